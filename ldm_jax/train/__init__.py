"""Training, on one process or several."""

from ldm_jax.train.run import train
from ldm_jax.train.run_directory import TrainedRun, load_run
from ldm_jax.train.step import StepMetrics, TrainState, make_state, make_train_step

__all__ = ["StepMetrics", "TrainState", "TrainedRun", "load_run", "make_state", "make_train_step", "train"]
