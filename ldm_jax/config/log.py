"""The `[log]` section of a config."""

from dataclasses import dataclass

from ldm_jax.options import check, check_at_least, check_option_types


@dataclass(frozen=True)
class LogConfig:
    """What is logged, and how often."""

    every: int = 10
    """Steps between rows of metrics."""
    memory_every: int = 100
    """Steps between rows of the depth memory's forgetting, gates, gains, importance and conditioning."""
    tensorboard: bool = False
    """Also write TensorBoard event files to RUN/tensorboard; needs the extra `tensorboard`."""
    wandb_project: str | None = None
    """Also log to this project of Weights & Biases; needs the extra `wandb`. None: off."""
    profile_from: int | None = None
    """First step of a jax.profiler trace, written to RUN/profile. None: off."""
    profile_steps: int = 3
    """Number of steps in the trace."""

    def __post_init__(self) -> None:
        check_option_types(self)
        check_at_least(self, 1, "every", "memory_every", "profile_steps")
        check(
            self.profile_from is None or self.profile_from >= 1,
            f"profile_from is {self.profile_from}, but steps are counted from 1.",
        )
        check(self.wandb_project != "", "wandb_project is empty, but it must name a project.")
