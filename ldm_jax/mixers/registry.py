"""The mixers by name, and the options of each."""

import enum
from dataclasses import dataclass

from flax import nnx

from ldm_jax.memory.depth_scan import Backward
from ldm_jax.mixers.base import MixerEnds, MixerLayer
from ldm_jax.mixers.depth_memory_config import Form, check_width
from ldm_jax.mixers.ldm import LDMConfig, LDMEnds, LDMLayer
from ldm_jax.mixers.ldm_fused import FusedLDMEnds, FusedLDMLayer
from ldm_jax.mixers.preln import PreLNEnds, PreLNLayer
from ldm_jax.typing import DType


class MixerKind(enum.StrEnum):
    """The depth mixers."""

    PRELN = "preln"
    LDM = "ldm"


@dataclass(frozen=True)
class MixerConfig:
    """How layers hear of each other: a kind, and a table of options for every kind that has any."""

    kind: MixerKind = MixerKind.LDM
    """Which mixer is used; the tables of the others are ignored."""
    ldm: LDMConfig = LDMConfig()
    backward: Backward | None = None
    """What the backward pass has of a block. stored: all it needs (fastest, if there is room). recomputed: its input.
    undone: the stream and the writes' corrections. None: undone where the mixer can, else recomputed."""

    @property
    def undoable(self) -> bool:
        """Whether the mixer's writes can be undone."""
        return self.kind is not MixerKind.LDM or self.ldm.undoable

    @property
    def backward_or_default(self) -> Backward:
        """`backward`, or what None stands for."""
        return self.backward or (Backward.UNDONE if self.undoable else Backward.RECOMPUTED)

    def __post_init__(self) -> None:
        if self.backward is Backward.UNDONE and not self.undoable:
            raise ValueError(
                f"backward is undone, but the write {self.ldm.write} can't be undone: it would divide by forgetting. "
                "Set backward to recomputed."
            )


def check_mixer(config: MixerConfig, width: int) -> None:
    """Raises ValueError unless the mixer that is used fits a stream of this width."""
    if config.kind is MixerKind.LDM:
        check_width(width, config.ldm)


def make_layer(config: MixerConfig, width: int, sublayers: int, *, dtype: DType, rngs: nnx.Rngs) -> MixerLayer:
    """The mixer's part of one of `sublayers` sublayers, in a stream of this width and compute type.

    Raises:
        ValueError: options that do not fit the width.
    """
    match config.kind:
        case MixerKind.PRELN:
            return PreLNLayer()
        case MixerKind.LDM:
            layer = FusedLDMLayer if config.ldm.form is Form.FUSED else LDMLayer
            return layer(width, sublayers, config.ldm, dtype=dtype, rngs=rngs)


def make_ends(
    config: MixerConfig, width: int, *, scanned_sublayers: int | None, dtype: DType, rngs: nnx.Rngs
) -> MixerEnds:
    """The mixer's part before the first sublayer and after the last. Errors as in `make_layer`.

    With `scanned_sublayers`, a scan goes over that many sublayers and the state keeps its shape; None: it may grow.
    """
    match config.kind:
        case MixerKind.PRELN:
            return PreLNEnds()
        case MixerKind.LDM:
            ends = FusedLDMEnds if config.ldm.form is Form.FUSED else LDMEnds
            return ends(width, config.ldm, scanned_sublayers=scanned_sublayers, dtype=dtype, rngs=rngs)
