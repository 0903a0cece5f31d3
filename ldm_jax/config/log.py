"""Options of what a run tells of itself."""

from dataclasses import dataclass

from ldm_jax.options import check, check_at_least, check_option_types


@dataclass(frozen=True)
class LogConfig:
    """What is logged beside `metrics.jsonl`, and how often."""

    every: int = 10
    """Steps from one row of metrics to the next."""
    memory_every: int = 100
    """Steps from one row of a depth memory's forgetting, gates, gains, importance and conditioning to the next."""
    tensorboard: bool = False
    """Also write event files for TensorBoard, to RUN/tensorboard; needs the extra `tensorboard`."""
    wandb_project: str | None = None
    """Also log to this project of Weights & Biases; needs the extra `wandb`. None: not."""
    profile_from: int | None = None
    """First step of a profile by jax.profiler, written to RUN/profile. None: no profile."""
    profile_steps: int = 3
    """Steps that a profile spans."""

    def __post_init__(self) -> None:
        check_option_types(self)
        check_at_least(self, 1, "every", "memory_every", "profile_steps")
        check(
            self.profile_from is None or self.profile_from >= 1,
            f"profile_from is {self.profile_from}, but steps are counted from 1.",
        )
        check(self.wandb_project != "", "wandb_project is empty, but it must name a project.")
