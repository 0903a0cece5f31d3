"""The depth mixers: `MIXERS` lists them, and everything else iterates over that list."""

import dataclasses
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flax import nnx

from ldm_jax.memory.depth_scan import Backward
from ldm_jax.mixers import attnres, attnres_block, denseformer, hc, ldm, mhc, preln
from ldm_jax.mixers.mixer import Mixer, MixerEnds, MixerLayer, MixerOptions, Place, Stack
from ldm_jax.options import check_option_types

MIXERS: tuple[Mixer, ...] = (
    preln.MIXER,
    ldm.MIXER,
    attnres.MIXER,
    attnres_block.MIXER,
    hc.MIXER,
    mhc.MIXER,
    denseformer.MIXER,
)

BY_KIND = {mixer.kind: mixer for mixer in MIXERS}
if TYPE_CHECKING:  # what type checkers see of the two classes that are made from the list

    class MixerKind(enum.StrEnum):
        """The kinds of `MIXERS`."""
else:
    MixerKind = enum.StrEnum("MixerKind", {kind.upper(): kind for kind in BY_KIND})


@dataclass(frozen=True)
class _MixerChoice:
    """How layers use each other's outputs: a kind, and a table of options for every kind that has any."""

    kind: MixerKind = MixerKind("ldm")  # noqa: RUF009
    """The depth mixer. The tables of the others are ignored."""
    backward: Backward | None = None
    """What is saved for the backward pass. stored: everything it needs (fastest, if there is room). remat: every
    block's input. reversible: the stream and the writes' residuals. None: reversible where the mixer is, else remat."""

    def __post_init__(self) -> None:
        check_option_types(self)
        if self.backward is Backward.REVERSIBLE and self.options.irreversible is not None:
            raise ValueError(
                f"backward is reversible, but {self.kind} is not: {self.options.irreversible}. Set backward to remat."
            )

    @property
    def mixer(self) -> Mixer:
        """The registry's entry."""
        return BY_KIND[self.kind]

    @property
    def options(self) -> MixerOptions:
        """The table of the kind that is used."""
        return getattr(self, self.kind, None) or self.mixer.options()

    @property
    def backward_or_default(self) -> Backward:
        """`backward`, or what None stands for."""
        reversible = self.options.irreversible is None
        return self.backward or (Backward.REVERSIBLE if reversible else Backward.REMAT)

    def with_options(self, **changes: Any) -> "MixerConfig":
        """The same with some options of the kind that is used changed."""
        return dataclasses.replace(self, **{self.kind: dataclasses.replace(self.options, **changes)})  # pyright: ignore


if TYPE_CHECKING:

    @dataclass(frozen=True)
    class MixerConfig(_MixerChoice):
        """The choice of a mixer, with one field for each table of options."""

        def __init__(
            self, kind: Any = "ldm", backward: Backward | str | None = None, **options: MixerOptions
        ) -> None: ...
else:
    MixerConfig = dataclasses.make_dataclass(
        "MixerConfig",
        [
            (mixer.kind, mixer.options, dataclasses.field(default=mixer.options()))
            for mixer in MIXERS
            if dataclasses.fields(mixer.options)
        ],
        bases=(_MixerChoice,),
        frozen=True,
        namespace={"__doc__": _MixerChoice.__doc__, "__module__": __name__},
    )


def make_layer(config: MixerConfig, stack: Stack, place: Place, rngs: nnx.Rngs) -> MixerLayer:
    """The mixer's part of one sublayer.

    Raises:
        ValueError: options that do not fit the width.
    """
    config.options.check_width(stack.width)
    return config.mixer.layer(config.options, stack, place, rngs)


def make_ends(config: MixerConfig, stack: Stack, rngs: nnx.Rngs) -> MixerEnds:
    """The mixer's part before the first sublayer and after the last. Errors as in `make_layer`."""
    config.options.check_width(stack.width)
    return config.mixer.ends(config.options, stack, rngs)
