"""Cases of a training step that a mesh must not change, and a pairwise-covering selection of them."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from ldm_jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from ldm_jax.memory.depth_scan import Backward
from ldm_jax.mixers import (
    AttnResBlockConfig,
    Form,
    HyperConfig,
    LDMConfig,
    MHCConfig,
    MixerConfig,
    MixerKind,
    Write,
)  # fmt: skip

ALL_MESHES = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(sizes) == 8]
MODEL = ModelConfig(depth=2, width=64, heads=8, mlp_width=72, loss_chunk=32)
LDM = LDMConfig(groups=8, key_dim=8, latent_dim=16)
# A group of the fused form is 128 wide, at least.
WIDE_MODEL = dataclasses.replace(MODEL, width=256, heads=2)
WIDE_LDM = dataclasses.replace(LDM, groups=2, key_dim=4)
LDM_OPTIONS = {
    "usual": {},
    "others": {
        "learned_alpha": True,
        "shared_key": True,
        "write_embedding": False,
    },
}
# Without clipping and momentum, AdamW's first moment after one update is the gradient itself.
OPTIMIZER = OptimizerConfig(beta1=0.0, clip_norm=1e9, z_loss=1e-3)


class Case(NamedTuple):
    """One training step, described by values that JSON can hold."""

    mixer: str = "rls"
    """A baseline, or how LDM writes."""
    mesh: tuple[int, int, int, int] = (2, 2, 1, 2)
    form: str = "recurrent"
    options: str = "usual"
    backward: str = "reversible"
    scan: bool = True
    accumulation: int = 1
    documents: bool = True
    type: str = "float64"
    """Type of the computation."""

    def config(self) -> Config:
        """The config. Raises ValueError for an inadmissible combination."""
        model = dataclasses.replace(WIDE_MODEL if self.form == Form.FUSED else MODEL, scan=self.scan)
        train = TrainConfig(batch_size=16, accumulation=self.accumulation)
        mesh, data = MeshConfig(*self.mesh), DataConfig(context=16)
        return Config(model, self._mixer(), data, optimizer=OPTIMIZER, train=train, mesh=mesh)

    def _mixer(self) -> MixerConfig:
        backward = Backward(self.backward)
        if self.mixer in list(Write):
            chosen = {"write": Write(self.mixer), "form": Form(self.form), **LDM_OPTIONS[self.options]}
            ldm = dataclasses.replace(WIDE_LDM if self.form == Form.FUSED else LDM, **chosen)
            return MixerConfig(ldm=ldm, backward=backward)
        if (self.form, self.options) != ("recurrent", "usual"):
            raise ValueError("a form or options of LDM, which is not the mixer.")
        block, streams = AttnResBlockConfig(block_size=2), 2
        return MixerConfig(
            MixerKind(self.mixer),
            attnres_block=block,
            hc=HyperConfig(streams=streams),
            mhc=MHCConfig(streams=streams),
            backward=backward,
        )


CHOICES = {
    "mixer": [*(write.value for write in Write), *(kind.value for kind in MixerKind if kind is not MixerKind.LDM)],
    "mesh": [(2, 2, 2, 1), (1, 2, 2, 2), (4, 1, 1, 2)],
    "form": ["recurrent", "dual"],
    "options": list(LDM_OPTIONS),
    "backward": [backward.value for backward in Backward],
    "scan": [True, False],
    "accumulation": [1, 2],
    "documents": [True, False],
}


def admissible() -> Iterator[Case]:
    """All admissible cases."""
    allowed: dict[tuple[object, ...], bool] = {}
    of_mixer = "mixer", "form", "options", "backward"
    for chosen in itertools.product(*CHOICES.values()):
        case = Case(**dict(zip(CHOICES, chosen, strict=True)))
        key = tuple(getattr(case, name) for name in of_mixer)
        if key not in allowed:
            try:
                case.config()
                allowed[key] = True
            except ValueError:
                allowed[key] = False
        if allowed[key]:
            yield case


def pairs(case: Case) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """All pairs of choices in a case."""
    return set(itertools.combinations([(name, getattr(case, name)) for name in CHOICES], 2))


def pairwise() -> list[Case]:
    """Cases that contain every admissible pair of choices, selected greedily by the number of new pairs."""
    every = {case: pairs(case) for case in admissible()}
    missing = set().union(*every.values())
    found = []
    while missing:
        best = max(every, key=lambda case: len(every[case] & missing))
        found.append(best)
        missing -= every[best]
    return found
