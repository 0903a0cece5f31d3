"""Training, by one process or several."""

from ldm_jax.train.run import train
from ldm_jax.train.step import StepMetrics, TrainState, make_state, make_train_step
from ldm_jax.train.trained import TrainedRun, load_run

__all__ = ["StepMetrics", "TrainState", "TrainedRun", "load_run", "make_state", "make_train_step", "train"]
