"""The `[optimizer]` section of a config."""

import enum
from dataclasses import dataclass

from ldm_jax.options import check, check_at_least, check_option_types


class OptimizerName(enum.StrEnum):
    """adamw: AdamW. muon: Muon for the matrices of blocks and mixers, AdamW for the rest."""

    ADAMW = "adamw"
    MUON = "muon"


class Schedule(enum.StrEnum):
    """The learning rate after the warm-up."""

    COSINE = "cosine"
    CONSTANT = "constant"


class Decay(enum.StrEnum):
    """The final decay of the constant schedule: linear, or `1 - sqrt(x)` for the fraction `x` of the decay."""

    LINEAR = "linear"
    SQRT = "sqrt"


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate schedule."""

    name: OptimizerName = OptimizerName.ADAMW
    """adamw, or muon for the matrices of blocks and mixers, and adamw for the rest."""
    learning_rate: float = 3e-3
    """Peak learning rate. Muon's updates are scaled to the size of AdamW's."""
    warmup_steps: int = 50
    """Steps of linear warm-up from 0; at most half of the steps."""
    schedule: Schedule = Schedule.COSINE
    """cosine: half a cosine down to the last step. constant: constant, then a decay down to the last step."""
    decay: Decay = Decay.LINEAR
    """Decay of the constant schedule: linear, or sqrt for 1 - sqrt."""
    decay_fraction: float = 0.2
    """Fraction of the steps over which the constant schedule decays at the end. 0: it does not decay."""
    final_learning_rate: float = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    weight_decay: float = 0.1
    """Decoupled weight decay of linear maps and the embedding, multiplied by the learning rate. Biases, scales and
    other coefficients do not decay."""
    mixer_learning_rate: float = 1.0
    """Factor on the learning rate of the mixer's parameters."""
    mixer_weight_decay: float | None = None
    """Weight decay of the mixer's linear maps. None: weight_decay."""
    beta1: float = 0.9
    """AdamW's decay of the mean of gradients."""
    beta2: float = 0.95
    """AdamW's decay of the mean of squared gradients."""
    muon_beta: float = 0.95
    """Muon's momentum."""
    clip_norm: float = 1.0
    """Global norm to which larger gradients are clipped."""
    z_loss: float = 0.0
    """Weight of the squared log-normaliser of the logits that is added to the loss (typically 1e-4)."""
    ema: float = 0.0
    """Decay of a moving average of the parameters, which then is validated, sampled and evaluated. 0: off."""

    def __post_init__(self) -> None:
        check_option_types(self)
        check_at_least(self, 0, "warmup_steps")
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
