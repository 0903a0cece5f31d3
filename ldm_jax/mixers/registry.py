"""The registry of depth mixers. Configs, the command line and tests iterate over `MIXERS`."""

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
    """Selects the depth mixer: its kind, and a table of options for every kind that has options."""

    kind: MixerKind = MixerKind("ldm")  # noqa: RUF009
    """The depth mixer. The option tables of other mixers are ignored."""
    backward: Backward | None = None
    """What is saved for the backward pass. stored: all intermediate values (fastest, needs most memory). remat: every
    block's input. reversible: the stream and the writes' residuals. None: reversible if the mixer is, else remat."""

    def __post_init__(self) -> None:
        check_option_types(self)
        if self.backward is Backward.REVERSIBLE and self.options.irreversible is not None:
            raise ValueError(
                f"backward is reversible, but the mixer {self.kind} is not: {self.options.irreversible}. Set backward "
                "to remat."
            )

    @property
    def mixer(self) -> Mixer:
        """The entry of the registry."""
        return BY_KIND[self.kind]

    @property
    def options(self) -> MixerOptions:
        """The options of the selected mixer."""
        return getattr(self, self.kind, None) or self.mixer.options()

    @property
    def backward_or_default(self) -> Backward:
        """`backward`, with None replaced by the default of the mixer."""
        reversible = self.options.irreversible is None
        return self.backward or (Backward.REVERSIBLE if reversible else Backward.REMAT)

    def with_options(self, **changes: Any) -> "MixerConfig":
        """A copy with some options of the selected mixer changed."""
        if not changes:
            return self  # pyright: ignore[reportReturnType]
        return dataclasses.replace(self, **{self.kind: dataclasses.replace(self.options, **changes)})  # pyright: ignore


if TYPE_CHECKING:

    @dataclass(frozen=True)
    class MixerConfig(_MixerChoice):
        """Selects the depth mixer, with one field per table of options."""

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
    """Makes the mixer's layer for one sublayer.

    Raises:
        ValueError: the options do not match the width.
    """
    config.options.check_width(stack.width)
    return config.mixer.layer(config.options, stack, place, rngs)


def make_ends(config: MixerConfig, stack: Stack, rngs: nnx.Rngs) -> MixerEnds:
    """Makes the mixer's ends. Errors as in `make_layer`."""
    config.options.check_width(stack.width)
    return config.mixer.ends(config.options, stack, rngs)
