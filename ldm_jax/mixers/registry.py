"""The mixers by name, and the options of each."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from flax import nnx
from jaxtyping import Array

from ldm_jax.memory.depth_scan import Backward
from ldm_jax.mixers.attnres import AttnResBlockConfig, AttnResBlockEnds, AttnResBlockLayer, AttnResEnds, AttnResLayer
from ldm_jax.mixers.base import MixerEnds, MixerLayer
from ldm_jax.mixers.dense import DenseFormerConfig, DenseFormerEnds, DenseFormerLayer
from ldm_jax.mixers.depth_memory_config import Form, check_width
from ldm_jax.mixers.hyper import HyperConfig, HyperLayer
from ldm_jax.mixers.ldm import LDMConfig, LDMEnds, LDMLayer
from ldm_jax.mixers.ldm_fused import FusedLDMEnds, FusedLDMLayer
from ldm_jax.mixers.mhc import MHCConfig, MHCLayer
from ldm_jax.mixers.preln import PreLNEnds, PreLNLayer
from ldm_jax.mixers.streams import StreamsEnds
from ldm_jax.options import check_option_types
from ldm_jax.typing import DType


class MixerKind(enum.StrEnum):
    """The depth mixers."""

    PRELN = "preln"
    LDM = "ldm"
    ATTNRES = "attnres"
    ATTNRES_BLOCK = "attnres_block"
    HC = "hc"
    MHC = "mhc"
    DENSEFORMER = "denseformer"


MIXING = (MixerKind.HC, MixerKind.MHC)
"""Those whose writes multiply the streams by a matrix, which undoing them would have to invert."""


class Place(NamedTuple):
    """Where a sublayer is: its block, counted from 0, and whether it is that block's last."""

    block: int | Array
    """May be traced: blocks are made by a `jax.vmap`."""
    last: bool


@dataclass(frozen=True)
class MixerConfig:
    """How layers hear of each other: a kind, and a table of options for every kind that has any."""

    kind: MixerKind = MixerKind.LDM
    """Which mixer is used; the tables of the others are ignored."""
    ldm: LDMConfig = LDMConfig()
    attnres_block: AttnResBlockConfig = AttnResBlockConfig()
    hc: HyperConfig = HyperConfig()
    mhc: MHCConfig = MHCConfig()
    denseformer: DenseFormerConfig = DenseFormerConfig()
    backward: Backward | None = None
    """What the backward pass has of a block. stored: all it needs (fastest, if there is room). recomputed: its input.
    undone: the stream and the writes' corrections. None: undone where the mixer can, else recomputed."""

    @property
    def reversible(self) -> bool:
        """Whether the mixer's writes can be undone."""
        if self.kind is MixerKind.LDM:
            return self.ldm.reversible
        return self.kind not in MIXING

    @property
    def backward_or_default(self) -> Backward:
        """`backward`, or what None stands for."""
        return self.backward or (Backward.REVERSIBLE if self.reversible else Backward.REMAT)

    def __post_init__(self) -> None:
        check_option_types(self)
        if self.backward is Backward.REVERSIBLE and not self.reversible:
            what, divisor = (f"the write {self.ldm.write}", "forgetting")
            if self.kind in MIXING:
                what, divisor = f"the mixer {self.kind}", "a matrix that mixes streams"
            raise ValueError(
                f"backward is reversible, but {what} can't be undone: it would divide by {divisor}. "
                "Set backward to remat."
            )


def check_mixer(config: MixerConfig, width: int) -> None:
    """Raises ValueError unless the mixer that is used fits a stream of this width."""
    if config.kind is MixerKind.LDM:
        check_width(width, config.ldm)


def make_layer(
    config: MixerConfig, width: int, sublayers: int, place: Place, *, dtype: DType, rngs: nnx.Rngs
) -> MixerLayer:
    """The mixer's part of one of `sublayers` sublayers, two for each block, in a stream of this width and compute type.

    Raises:
        ValueError: options that do not fit the width.
    """
    match config.kind:
        case MixerKind.PRELN:
            return PreLNLayer()
        case MixerKind.LDM:
            layer = FusedLDMLayer if config.ldm.form is Form.FUSED else LDMLayer
            return layer(width, sublayers, config.ldm, dtype=dtype, rngs=rngs)
        case MixerKind.ATTNRES:
            return AttnResLayer(width, dtype=dtype)
        case MixerKind.ATTNRES_BLOCK:
            return AttnResBlockLayer(width, config.attnres_block, dtype=dtype)
        case MixerKind.HC:
            return HyperLayer(width, 2 * place.block + place.last, config.hc, rngs=rngs)
        case MixerKind.MHC:
            return MHCLayer(width, config.mhc, rngs=rngs)
        case MixerKind.DENSEFORMER:
            return DenseFormerLayer(sublayers // 2, place.block, config.denseformer) if place.last else PreLNLayer()


def make_ends(
    config: MixerConfig, width: int, sublayers: int, *, scanned: bool, dtype: DType, rngs: nnx.Rngs
) -> MixerEnds:
    """The mixer's part before the first sublayer and after the last. Errors as in `make_layer`.

    Where a scan goes over the blocks (`scanned`), the state keeps its shape; otherwise it may grow.
    """
    match config.kind:
        case MixerKind.PRELN:
            return PreLNEnds()
        case MixerKind.LDM:
            ends = FusedLDMEnds if config.ldm.form is Form.FUSED else LDMEnds
            return ends(width, config.ldm, scanned_sublayers=sublayers if scanned else None, dtype=dtype, rngs=rngs)
        case MixerKind.ATTNRES:
            return AttnResEnds(width, scanned_sublayers=sublayers if scanned else None, dtype=dtype)
        case MixerKind.ATTNRES_BLOCK:
            return AttnResBlockEnds(width, sublayers, config.attnres_block, dtype=dtype)
        case MixerKind.HC:
            return StreamsEnds(config.hc.streams)
        case MixerKind.MHC:
            return StreamsEnds(config.mhc.streams)
        case MixerKind.DENSEFORMER:
            return DenseFormerEnds(sublayers // 2 if scanned else None, config.denseformer)
