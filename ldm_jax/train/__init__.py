"""Training, on one process or several."""

from ldm_jax.runs.state import TrainState
from ldm_jax.train.run import train
from ldm_jax.train.step import StepMetrics, make_state, make_train_step

__all__ = ["StepMetrics", "TrainState", "make_state", "make_train_step", "train"]
