"""The `[mesh]` section of a config: how the devices share the work."""

import math
from dataclasses import dataclass

from ldm_jax.axes import MeshAxis
from ldm_jax.options import check, check_option_types


@dataclass(frozen=True)
class MeshConfig:
    """Numbers of devices. Their product is the number of all devices."""

    data: int | None = None
    """Parts of the batch. Each has all parameters. None: as many as the other axes leave."""
    fsdp: int = 1
    """Parts of the batch, too; each keeps its part of the parameters and is sent the others' when it needs them."""
    context: int = 1
    """Parts of every window."""
    tensor: int = 1
    """Parts of heads, MLP, vocabulary and groups of the depth memory."""

    def __post_init__(self) -> None:
        check_option_types(self)
        for name in ("data", "fsdp", "context", "tensor"):
            value = getattr(self, name)
            check(value is None or value >= 1, f"{name} is {value}, but it must be at least 1.")

    def sizes(self, devices: int) -> dict[MeshAxis, int]:
        """Of every axis, for so many devices. Raises ValueError if their product is another number."""
        others = self.fsdp * self.context * self.tensor
        data = devices // others if self.data is None else self.data
        sizes = dict(zip(MeshAxis, (data, self.fsdp, self.context, self.tensor), strict=True))
        if math.prod(sizes.values()) != devices:
            text = " x ".join(f"{name} {size}" for name, size in sizes.items() if name != MeshAxis.DATA or self.data)
            raise ValueError(
                f"the mesh {text} does not fit {devices} devices: the product must be {devices}, or divide it if data "
                "is left out."
            )
        return sizes
