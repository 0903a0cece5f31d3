"""The mixers by name, and the options of each."""

import enum
from dataclasses import dataclass

from flax import nnx

from ldm_jax.mixers.base import MixerEnds, MixerLayer
from ldm_jax.mixers.depth_memory import check_width
from ldm_jax.mixers.ldm import LDMConfig, LDMEnds, LDMLayer
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
            return LDMLayer(width, sublayers, config.ldm, dtype=dtype, rngs=rngs)


def make_ends(config: MixerConfig, width: int, *, dtype: DType, rngs: nnx.Rngs) -> MixerEnds:
    """The mixer's part before the first sublayer and after the last. Errors as in `make_layer`."""
    match config.kind:
        case MixerKind.PRELN:
            return PreLNEnds()
        case MixerKind.LDM:
            return LDMEnds(width, config.ldm, dtype=dtype, rngs=rngs)
