"""A trained run, to be sampled or evaluated."""

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from flax import nnx

from ldm_jax.config import Config
from ldm_jax.data import Tokenizer, load_tokenizer
from ldm_jax.errors import UserError
from ldm_jax.nn import Params, Transformer, model_graph
from ldm_jax.train.checkpoints import Checkpoints
from ldm_jax.train.run_directory import checkpoints_folder, stored_config
from ldm_jax.train.step import make_state


class TrainedRun(NamedTuple):
    """What a run's last checkpoint holds; `nnx.merge(graph, params)` is the model."""

    config: Config
    step: int
    graph: nnx.GraphDef[Transformer]
    params: Params
    tokenizer: Tokenizer
    corpus: str
    """Fingerprint of the corpus that it was trained on."""


def load_run(path: Path) -> TrainedRun:
    """The last checkpoint of the run in a folder, under the config that is stored with it.

    Raises:
        UserError: the folder holds no run, or the run no checkpoint yet.
    """
    config = stored_config(path)
    checkpoints = Checkpoints(checkpoints_folder(config, path), config.train.keep_checkpoints, config.train.keep_every)
    try:
        restored = checkpoints.restore_latest(make_state(config))
    finally:
        checkpoints.close()
    if restored is None:
        raise UserError(f"the run in {path} has no checkpoint yet: the first comes with train.checkpoint_every.")
    state, progress, warnings = restored
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in progress.tokenizer.items():
            (Path(folder) / name).write_bytes(text.encode())
        tokenizer = load_tokenizer(Path(folder))
    graph = model_graph(config.model, config.mixer)
    return TrainedRun(config, int(state.step), graph, state.trained, tokenizer, progress.corpus)
