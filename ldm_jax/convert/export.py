"""Exported models: a run's parameters in safetensors files, as a checkpoint of transformers or with our own names."""

import dataclasses
import enum
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

import ldm_jax
from ldm_jax.config import ModelConfig
from ldm_jax.config.toml import config_to_table, config_to_toml, parse_config, table_to_config
from ldm_jax.convert.hf_config import CONFIG_FILE, read_key, read_table, write_hf_config
from ldm_jax.convert.hf_import import read_hf
from ldm_jax.convert.weights import Weights, exact_type, hf_layout, load_params, own_layout, save_params
from ldm_jax.data import load_tokenizer, tokenizer_files, tokenizer_from_files
from ldm_jax.data.tokenizer import DESCRIPTION_FILE, TOKENIZER_FILE
from ldm_jax.errors import UserError
from ldm_jax.files import new_directory, require_absent
from ldm_jax.nn import Params
from ldm_jax.runs.changes import find_changes
from ldm_jax.runs.checkpoints import Progress, SavedParams
from ldm_jax.runs.run_directory import SavedRun, adapt_config, read_run

MODEL_TYPE = "ldm_jax"
"""The `model_type` in the `config.json` of a model that only this library reads."""
SHARD_BYTES = 10**9
"""Larger models are exported as several files."""
NO_TOKENIZER = "none"


class Format(enum.StrEnum):
    """transformers: a Llama, Qwen2 or Qwen3 checkpoint, for preln. ldm_jax: our names, for every mixer."""

    TRANSFORMERS = "transformers"
    LDM_JAX = "ldm_jax"


class StoredType(enum.StrEnum):
    """The type of exported parameters."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Exported(NamedTuple):
    """What was written."""

    architecture: str
    """The class of transformers, or ldm_jax."""
    step: int
    dtype: StoredType
    untied: bool
    """Whether the head of a tied model is stored by itself, because the embedding is scaled."""


def export(
    source: Path,
    out: Path,
    *,
    format: Format | None = None,
    dtype: StoredType | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Writes the model of a run to a new directory, which gets its name when it is complete.

    Args:
        source: RUN or RUN@STEP, or the directory of an exported model.
        out: the new directory, which must not exist or be empty.
        format: None: transformers for preln, else ldm_jax.
        dtype: type of the parameters. None: the smallest that holds all of them exactly, so that a checkpoint in
            bfloat16 that was imported has the same bits.
        shard_bytes: size of a file of parameters.

    Raises:
        UserError: there is no such run, its model does not fit the format or the type, or `out` cannot be written.
    """
    require_absent(out)
    run = read_model(source)
    model, mixer, saved = run.config.model, run.config.mixer, run.saved
    preln = mixer.kind == "preln"
    if format is Format.TRANSFORMERS and not preln:
        raise UserError(
            f"mixer.kind is {mixer.kind}, which no class of transformers has: leave out --format, or set it to ldm_jax."
        )
    files, params, untied = saved.progress.tokenizer, saved.params, False
    description = json.loads(files[DESCRIPTION_FILE]) if files else {}
    start = next(iter(tokenizer_from_files(files).start), None) if files else None
    config = parse_config(saved.progress.config, f"the config of step {saved.step} in {run.path}")
    if preln and format is not Format.LDM_JAX:
        untied = model.scale_embedding and model.tied
        model, params = _with_scaled_embedding(model, params)
        table = write_hf_config(model, config.data.context, start, description.get("end_of_document"))
        layout = hf_layout(model)
    else:
        table = {
            "model_type": MODEL_TYPE,
            "version": ldm_jax.__version__,
            "step": saved.step,
            "averaged": saved.averaged,
            "corpus": saved.progress.corpus,
            "tokenizer": description.get("fingerprint", NO_TOKENIZER),
            "config": config_to_table(config),
        }
        layout = own_layout(model, mixer)
    dtype = dtype or StoredType(exact_type(params, layout))
    texts = files | {CONFIG_FILE: _json(table | {"torch_dtype": dtype.value})}
    if TOKENIZER_FILE in files:
        names = {added["id"]: added["content"] for added in json.loads(files[TOKENIZER_FILE])["added_tokens"]}
        texts["tokenizer_config.json"] = _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **({} if start is None else {"bos_token": names[start]}),
                "eos_token": description["end_of_document_token"],
                "model_max_length": config.data.context,
                "clean_up_tokenization_spaces": False,
            }
        )
    metadata = {
        "format": "pt",  # which transformers requires
        "version": ldm_jax.__version__,
        "step": str(saved.step),
        "corpus": saved.progress.corpus,
        "config": saved.progress.config,
    }
    with new_directory(out) as directory:
        for name, text in texts.items():
            (directory / name).write_bytes(text.encode())
        save_params(directory, params, layout, dtype.value, metadata, shard_bytes)
    return Exported(table.get("architectures", [MODEL_TYPE])[0], saved.step, dtype, untied)


def _json(table: dict[str, Any]) -> str:
    return json.dumps(table, indent=2) + "\n"


def _with_scaled_embedding(model: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The model without `scale_embedding`, with the entries that are computed in float32, so that no logit changes.

    A tied head is the table before it is scaled, so it becomes a parameter.
    """
    if not model.scale_embedding:
        return model, params
    table = np.asarray(params["embed"]["embedding"])
    params = params | {"embed": {"embedding": table * np.float32(model.width**0.5)}}
    if model.tied:
        params["head"] = {"kernel": table.T}
    return dataclasses.replace(model, scale_embedding=False, tied=False), params


def read_model(path: Path, mesh: Mesh | None = None) -> SavedRun:
    """Reads the parameters of a run, as `read_run`, or of an exported model or a Hugging Face checkpoint.

    Args:
        path: RUN or RUN@STEP; or the directory of an exported model or a Hugging Face checkpoint.
        mesh: where the parameters are placed; None for one device.

    Raises:
        UserError: there is no such run, or the files of the model are not supported or not as they were written.
    """
    if not (path / CONFIG_FILE).is_file() or (path / "config.toml").is_file():
        return read_run(path, mesh)
    table = read_table(path)
    if table.get("model_type") != MODEL_TYPE:
        config, weights, layout, files = read_hf(path)
        # Step and corpus are in exports of this library.
        progress = Progress(0, 0.0, weights.metadata.get("corpus", ""), config_to_toml(config), files)
        step = weights.metadata.get("step", "0")
        step = int(step) if step.isdecimal() else 0
        return SavedRun(path, config, SavedParams(step, load_params(weights, layout, mesh), False, progress))
    try:
        step, averaged = read_key(table, "step", int), read_key(table, "averaged", bool)
        corpus, fingerprint = read_key(table, "corpus", str), read_key(table, "tokenizer", str)
        config = table_to_config(read_key(table, "config", dict), str(path / CONFIG_FILE))
    except ValueError as error:
        raise UserError(f"{path / CONFIG_FILE}: {error}") from error
    weights = Weights(path)
    written = parse_config(
        weights.metadata.get("config", config_to_toml(config)), f"the config in the weights of {path}"
    )
    for change in find_changes(written, config).model:
        if change.startswith(("model.", "mixer.")):
            raise UserError(f"{path / CONFIG_FILE} is not that of the weights: {change}. Restore the file.")
    layout = own_layout(config.model, config.mixer)
    weights.check(layout)
    files = {}
    if fingerprint != NO_TOKENIZER:
        tokenizer = load_tokenizer(path)
        if tokenizer.fingerprint != fingerprint:
            raise UserError(f"the tokenizer in {path} is not that of its {CONFIG_FILE}: restore the files.")
        files = tokenizer_files(tokenizer)
    progress = Progress(0, 0.0, corpus, config_to_toml(config), files)
    return SavedRun(
        path, adapt_config(config), SavedParams(step, load_params(weights, layout, mesh), averaged, progress)
    )
