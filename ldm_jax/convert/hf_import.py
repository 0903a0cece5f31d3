"""A Hugging Face checkpoint as a run."""

import contextlib
import tempfile
from pathlib import Path

import jax
import numpy as np
import tokenizers
from jax.sharding import AxisType, Mesh

from ldm_jax.config import Config, DataConfig
from ldm_jax.config.toml import config_to_toml
from ldm_jax.convert.hf_config import read_hf_config
from ldm_jax.convert.hf_weights import PRELN, HFWeights, load_hf_params
from ldm_jax.data import JsonTokenizer, read_tokenizer, tokenizer_files
from ldm_jax.errors import UserError
from ldm_jax.files import writing
from ldm_jax.runs.checkpoints import Checkpoints, Progress
from ldm_jax.runs.run_directory import RunDirectory
from ldm_jax.runs.state import TrainState
from ldm_jax.sharding import MeshAxis


def import_hf(
    source: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    end_of_document: str | None = None,
    context: int | None = None,
    corpora: tuple[str, ...] = (),
) -> Config:
    """Writes the model of a Hugging Face checkpoint as a run at step 0, which training continues.

    Everything is checked before the directory is made, and it gets its name when it is complete.

    Args:
        source: directory with `config.json`, the weights, and `tokenizer.json` where there is one.
        out: directory of the run, which must not exist or be empty.
        tokenizer: a `tokenizer.json`. None: that of the source.
        end_of_document: name of the end-of-document token. None: as for a corpus, else the `eos_token_id`.
        context: tokens of a window. None: `max_position_embeddings`.
        corpora: prepared corpora to train on. None: `OUT/corpus`, which may be prepared later.

    Returns:
        The config of the run.

    Raises:
        UserError: the checkpoint has something that is not supported, or the directory cannot be written.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists: give another --out.")
    hf = read_hf_config(source, context)
    weights = HFWeights(source)
    weights.check(hf.model)
    files = _tokenizer_files(source, tokenizer, end_of_document, hf.end_of_document, hf.model.vocabulary)
    config = Config(hf.model, PRELN, DataConfig(corpora=corpora or (str(out / "corpus"),), context=hf.context))
    with writing(f"the run {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as directory:
            _write(config, weights, files, written := Path(directory) / "run")
            written.rename(out)
    return config


def _write(config: Config, weights: HFWeights, tokenizer: dict[str, str], path: Path) -> None:
    store = path / "checkpoints"
    store.mkdir(parents=True)
    mesh = None
    if jax.device_count() > 1:  # sharded over all devices along the width, where they divide it
        devices = np.array(jax.devices()).reshape(1, -1, 1, 1)
        mesh = Mesh(devices, tuple(axis.value for axis in MeshAxis), axis_types=(AxisType.Auto,) * 4)
    text = config_to_toml(config)
    RunDirectory(path).store(text)
    with (
        contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh),
        contextlib.closing(Checkpoints(store, keep=1)) as checkpoints,
    ):
        state = TrainState.imported(load_hf_params(weights, config.model, mesh))
        progress = Progress(0, 0.0, "", text, tokenizer)
        if (why := checkpoints.save(0, state, progress) or checkpoints.wait()) is not None:
            raise UserError(why)


def _tokenizer_files(
    source: Path, file: Path | None, end_of_document: str | None, end: int | None, vocabulary: int
) -> dict[str, str]:
    """The tokenizer's files by name; none if there is no tokenizer."""
    if file is None and not (file := source / "tokenizer.json").is_file():
        return {}
    tokenizer = _read_tokenizer(file, end_of_document, end)
    if tokenizer.vocabulary > vocabulary:
        raise UserError(
            f"{file} has {tokenizer.vocabulary} tokens, but the vocabulary of the model is {vocabulary}: give the "
            "tokenizer of this model."
        )
    return tokenizer_files(tokenizer)


def _read_tokenizer(file: Path, end_of_document: str | None, end: int | None) -> JsonTokenizer:
    try:
        return read_tokenizer(file, end_of_document)
    except UserError:
        name = None if end is None or end_of_document is not None else _token_name(file, end)
        if name is None:
            raise
        return read_tokenizer(file, name)


def _token_name(file: Path, token: int) -> str | None:
    """The name of a token; None if the file has none, or is not a tokenizer."""
    with contextlib.suppress(Exception):  # the library raises this type
        return tokenizers.Tokenizer.from_file(str(file)).id_to_token(token)
    return None
