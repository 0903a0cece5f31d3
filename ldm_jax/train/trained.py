"""A trained run, to be sampled or evaluated."""

from pathlib import Path
from typing import NamedTuple

from flax import nnx

from ldm_jax.config import Config
from ldm_jax.errors import UserError
from ldm_jax.nn import Params, Transformer, model_graph
from ldm_jax.train.checkpoints import Checkpoints
from ldm_jax.train.run_directory import RunDirectory, stored_config
from ldm_jax.train.step import make_state


class TrainedRun(NamedTuple):
    """What a run's last checkpoint holds; `nnx.merge(graph, params)` is the model."""

    config: Config
    step: int
    graph: nnx.GraphDef[Transformer]
    params: Params
    corpus: str
    """Fingerprint of the corpus that it was trained on."""


def load_run(path: Path) -> TrainedRun:
    """The last checkpoint of the run in a folder, under the config that is stored with it.

    Raises:
        UserError: the folder holds no run, or the run no checkpoint yet.
    """
    config = stored_config(path)
    checkpoints = Checkpoints(RunDirectory(path).checkpoints, config.train.keep_checkpoints)
    try:
        step = checkpoints.latest_step()
        if step is None:
            raise UserError(f"the run in {path} has no checkpoint yet: the first comes with train.checkpoint_every.")
        state, progress = checkpoints.restore(step, make_state(config))
    finally:
        checkpoints.close()
    return TrainedRun(config, step, model_graph(config.model, config.mixer), state.params, progress.corpus)
