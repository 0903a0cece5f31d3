"""The `[mesh]` section of a config: how the devices share the work."""

from dataclasses import dataclass

from ldm_jax.options import check, check_option_types
from ldm_jax.sharding import MeshAxis


@dataclass(frozen=True)
class MeshConfig:
    """Numbers of devices, whose product is the number of all devices."""

    data: int | None = None
    """Parts of the batch. Each has all parameters. None: as many as the others leave and divide the batch."""
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

    def sizes(self, devices: int, batch: int) -> dict[MeshAxis, int]:
        """Of every axis, for so many devices and windows computed at a time.

        Where `data` is left out it is the most that the devices have room for and that divides the windows.

        Raises:
            ValueError: the product is not the number of devices, or does not divide it where `data` is left out.
        """
        others = self.fsdp * self.context * self.tensor
        given = f"fsdp {self.fsdp} x context {self.context} x tensor {self.tensor}"
        if self.data is not None and self.data * others != devices:
            raise ValueError(
                f"the mesh data {self.data} x {given} does not fit {devices} devices: the product must be {devices}."
            )
        if devices % others:
            raise ValueError(f"the mesh {given} does not fit {devices} devices: the product must divide {devices}.")
        room, windows = devices // others, batch // self.fsdp
        data = self.data or max(parts for parts in range(1, room + 1) if room % parts == 0 == windows % parts)
        return dict(zip(MeshAxis, (data, self.fsdp, self.context, self.tensor), strict=True))
