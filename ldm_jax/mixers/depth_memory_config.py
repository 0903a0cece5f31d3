"""The options of a depth memory."""

import enum
from dataclasses import dataclass

from ldm_jax.options import check_option_types

FUSED_WIDTH = 128  # of a TPU's registers
FUSED_SIZE = 8192  # K V of a group, which takes 64 MiB of on-chip memory; a v4 chip has room for 2048


class Write(enum.StrEnum):
    """How an observation enters the memory."""

    RLS = "rls"
    SQRT_RLS = "sqrt_rls"
    ADDITIVE = "additive"
    DELTA = "delta"


class Form(enum.StrEnum):
    """recurrent: carry the memory. dual: carry its inverse covariance, and keep the values. fused: as recurrent, but a
    write and the next read are one kernel."""

    RECURRENT = "recurrent"
    DUAL = "dual"
    FUSED = "fused"


@dataclass(frozen=True)
class DepthMemoryConfig:
    """A depth memory's options."""

    groups: int = 4
    """G: the groups that the width is split into; each has its own memory, forgetting, gates and gain."""
    key_dim: int = 8
    """K: width of keys and queries. The state is K times as wide as the stream."""
    latent_dim: int = 32
    """R: width of the latent that keys and importance, or queries and gates, are computed from."""
    alpha: float = 10.0
    """One over the ridge of the regression."""
    forgetting_floor: float | None = None
    """What forgetting cannot fall below. None: 1e-3 ** (1 / sublayers), so that the ridge keeps 1e-3 of its weight."""
    unit_keys: bool = True
    """Scale keys and queries to unit length."""
    shared_key: bool = False
    """One key for all groups instead of one for each."""
    initial_gain: float = 2.0
    """The read's gain at the start. The read gate starts at one half."""
    write: Write = Write.RLS
    """How an observation enters the memory."""
    form: Form = Form.RECURRENT
    """recurrent: carry the memory. dual: keep the values and sum them; moves less where depth is small and K large.
    fused: as recurrent, a write and the next read being one Pallas kernel; for TPUs."""

    @property
    def reversible(self) -> bool:
        """Whether the backward pass can undo the writes: `additive` and `delta` would divide `M` by forgetting."""
        return self.form is Form.DUAL or self.write in (Write.RLS, Write.SQRT_RLS)

    def __post_init__(self) -> None:
        check_option_types(self)
        for name in ("groups", "key_dim", "latent_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        if not 1e-30 <= self.alpha <= 1e30:  # the state is float32
            raise ValueError(f"alpha is {self.alpha}, but it must be positive, from 1e-30 to 1e30.")
        if not abs(self.initial_gain) < float("inf"):
            raise ValueError(f"initial_gain is {self.initial_gain}, but it must be finite.")
        if self.forgetting_floor is not None and not 0 < self.forgetting_floor <= 1:
            raise ValueError(f"forgetting_floor is {self.forgetting_floor}, but it must lie in (0, 1].")
        if self.write is Write.DELTA and not self.unit_keys:
            raise ValueError("write is delta, which diverges on long keys, but unit_keys is false: set it to true.")
        if self.write is Write.DELTA and self.form is Form.DUAL:
            raise ValueError("form is dual, which the write delta does not have: set form to recurrent.")
        if self.form is Form.FUSED and self.write not in (Write.RLS, Write.SQRT_RLS):
            raise ValueError(f"form is fused, which the write {self.write} does not have: set form to recurrent.")


def check_width(width: int, config: DepthMemoryConfig) -> None:
    """Raises ValueError unless the groups divide the width."""
    if width % config.groups:
        raise ValueError(f"groups is {config.groups}, which does not divide the width {width}.")
    value_dim = width // config.groups
    if config.form is Form.FUSED and (value_dim % FUSED_WIDTH or value_dim * config.key_dim > FUSED_SIZE):
        raise ValueError(
            f"form is fused, whose kernel takes groups whose width is a multiple of {FUSED_WIDTH} and at most "
            f"{FUSED_SIZE} / key_dim, but key_dim is {config.key_dim} and groups is {config.groups}, which makes "
            f"groups {value_dim} of {width} wide: change groups, or set form to recurrent."
        )
