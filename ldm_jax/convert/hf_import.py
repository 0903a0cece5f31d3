"""A Hugging Face checkpoint as a run."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import tokenizers
from jax.sharding import AxisType, Mesh

from ldm_jax.config import Config, DataConfig, OptimizerConfig
from ldm_jax.config.toml import config_to_toml
from ldm_jax.convert.hf_config import read_hf_config
from ldm_jax.convert.weights import PRELN, Layout, Weights, hf_layout, load_params
from ldm_jax.data import JsonTokenizer, load_tokenizer, read_tokenizer, tokenizer_files
from ldm_jax.data.tokenizer import DESCRIPTION_FILE, TOKENIZER_FILE
from ldm_jax.errors import UserError
from ldm_jax.files import new_directory, require_absent
from ldm_jax.runs.checkpoints import Checkpoints, Progress
from ldm_jax.runs.run_directory import RunDirectory
from ldm_jax.runs.state import TrainState
from ldm_jax.sharding import MeshAxis

LEARNING_RATE = 2e-5
"""Of the config of an imported model: that of a new model would undo its training."""


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
    require_absent(out)
    checkpoint = read_hf(source, tokenizer, end_of_document, context, corpora or (str(out / "corpus"),))
    with new_directory(out) as directory:
        _write(checkpoint, directory)
    return checkpoint.config


class HFCheckpoint(NamedTuple):
    """A Hugging Face checkpoint that is supported; its tensors have not been read."""

    config: Config
    """The config of a run with the model."""
    weights: Weights
    layout: Layout
    tokenizer: dict[str, str]
    """The tokenizer's files by name; empty if there is none."""


def read_hf(
    source: Path,
    tokenizer: Path | None = None,
    end_of_document: str | None = None,
    context: int | None = None,
    corpora: tuple[str, ...] = (),
) -> HFCheckpoint:
    """Reads all of a checkpoint but the tensors. Arguments and errors as in `import_hf`."""
    hf = read_hf_config(source, context)
    weights, layout = Weights(source), hf_layout(hf.model)
    weights.check(layout)
    files = _tokenizer_files(source, tokenizer, end_of_document, hf.end_of_document, hf.model.vocabulary)
    data = DataConfig(corpora=corpora or (str(source / "corpus"),), context=hf.context)
    config = Config(hf.model, PRELN, data, OptimizerConfig(learning_rate=LEARNING_RATE))
    return HFCheckpoint(config, weights, layout, files)


def _write(checkpoint: HFCheckpoint, path: Path) -> None:
    (store := path / "checkpoints").mkdir()
    mesh = None
    if jax.device_count() > 1:  # sharded over all devices along the width, where they divide it
        devices = np.array(jax.devices()).reshape(1, -1, 1, 1)
        mesh = Mesh(devices, tuple(axis.value for axis in MeshAxis), axis_types=(AxisType.Auto,) * 4)
    text = config_to_toml(checkpoint.config)
    RunDirectory(path).store(text)
    with (
        contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh),
        contextlib.closing(Checkpoints(store, keep=1)) as checkpoints,
    ):
        state = TrainState.imported(load_params(checkpoint.weights, checkpoint.layout, mesh))
        progress = Progress(0, 0.0, "", text, checkpoint.tokenizer)
        if (why := checkpoints.save(0, state, progress) or checkpoints.wait()) is not None:
            raise UserError(why)


def _tokenizer_files(
    source: Path, file: Path | None, end_of_document: str | None, end: int | None, vocabulary: int
) -> dict[str, str]:
    """The tokenizer's files by name; none if there is no tokenizer."""
    described = file is None and end_of_document is None and (source / DESCRIPTION_FILE).is_file()
    if file is None and not (file := source / TOKENIZER_FILE).is_file() and not described:
        return {}
    tokenizer = load_tokenizer(source) if described else _read_tokenizer(file, end_of_document, end)
    if tokenizer.vocabulary > vocabulary:
        raise UserError(
            f"the tokenizer {file} has {tokenizer.vocabulary} tokens, but the vocabulary of the model is {vocabulary}: "
            "give the tokenizer of this model."
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
