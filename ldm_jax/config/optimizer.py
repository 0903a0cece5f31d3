"""Options of the optimiser."""

import enum
from dataclasses import dataclass

from ldm_jax.options import check, check_at_least, check_option_types


class OptimizerName(enum.StrEnum):
    """adamw: all by AdamW. muon: matrices in the blocks by Muon, embeddings, vectors and scalars by AdamW."""

    ADAMW = "adamw"
    MUON = "muon"


class Schedule(enum.StrEnum):
    """How the learning rate moves after the warm-up."""

    COSINE = "cosine"
    CONSTANT = "constant"


class Decay(enum.StrEnum):
    """How the constant schedule falls at its end: in a straight line, or as `1 - sqrt(part of the fall)`."""

    LINEAR = "linear"
    SQRT = "sqrt"


@dataclass(frozen=True)
class OptimizerConfig:
    """The update."""

    name: OptimizerName = OptimizerName.ADAMW
    """adamw, or muon for the matrices of the blocks."""
    learning_rate: float = 3e-3
    """The highest rate, at the end of the warm-up. Muon's updates are scaled to the size of AdamW's."""
    warmup_steps: int = 50
    """Updates over which the rate rises linearly from 0; at most half of the steps."""
    schedule: Schedule = Schedule.COSINE
    """cosine: falls along half a cosine until the last step. constant: stays, then falls."""
    decay: Decay = Decay.LINEAR
    """How the constant schedule falls: linear, or sqrt (1 - sqrt)."""
    decay_fraction: float = 0.2
    """Part of the steps, the last ones, over which the rate falls; of the constant schedule."""
    final_learning_rate: float = 0.1
    """Where the rate ends, as a fraction of the highest."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices, times the rate; vectors and scalars have none."""
    mixer_learning_rate: float = 1.0
    """The rate of the mixer's parameters (of a depth memory: all that it learns), as a multiple of the others'."""
    mixer_weight_decay: float | None = None
    """Weight decay of the mixer's matrices. None: weight_decay."""
    beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""
    beta2: float = 0.95
    """Decay of AdamW's mean of squared gradients."""
    muon_beta: float = 0.95
    """Decay of Muon's momentum."""
    clip_norm: float = 1.0
    """Longest gradient over all parameters; a longer one is scaled down to it."""
    z_loss: float = 0.0
    """Weight of the squared log-normaliser of the logits, which is added to the loss (1e-4 is usual)."""
    ema: float = 0.0
    """Decay of a running mean of the parameters, which is then what is validated, sampled and evaluated. 0: none."""

    def __post_init__(self) -> None:
        check_option_types(self)
        check_at_least(self, 0, "warmup_steps", "weight_decay", "mixer_learning_rate", "z_loss")
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            check(0 < value < float("inf"), f"{name} is {value}, but it must be positive and finite.")
        for name in ("weight_decay", "mixer_learning_rate", "z_loss", "mixer_weight_decay"):
            value = getattr(self, name)
            check(
                value is None or 0 <= value < float("inf"),
                f"{name} is {value}, but it must be finite and not negative.",
            )
        for name in ("decay_fraction", "final_learning_rate"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"{name} is {value}, but it must lie in [0, 1].")
        for name in ("beta1", "beta2", "muon_beta", "ema"):
            value = getattr(self, name)
            check(0 <= value < 1, f"{name} is {value}, but it must lie in [0, 1).")
