"""The `[mesh]` section of a config."""

from dataclasses import dataclass

from ldm_jax.options import check, check_option_types
from ldm_jax.sharding import MeshAxis


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices."""

    data: int | None = None
    """Shards the batch; parameters are replicated. None: the most devices that the other axes leave and that divide the
    batch evenly."""
    fsdp: int = 1
    """Shards the batch, and the parameters, which are gathered when they are used."""
    context: int = 1
    """Shards the tokens of a window."""
    tensor: int = 1
    """Shards heads, MLP, vocabulary and the groups of the depth memory."""

    def __post_init__(self) -> None:
        check_option_types(self)
        for name in ("data", "fsdp", "context", "tensor"):
            value = getattr(self, name)
            check(value is None or value >= 1, f"{name} is {value}, but it must be at least 1.")

    def sizes(self, devices: int, batch: int) -> dict[MeshAxis, int]:
        """The size of each axis. If `data` is None it is the largest that the devices allow and that divides the batch.

        Args:
            devices: number of devices.
            batch: number of windows that are computed at a time.

        Raises:
            ValueError: the product is not the number of devices, or, if `data` is None, does not divide it.
        """
        others = self.fsdp * self.context * self.tensor
        available = f"{devices} device" + ("s" if devices > 1 else "")
        given = f"fsdp {self.fsdp} x context {self.context} x tensor {self.tensor}"
        if self.data is not None and self.data * others != devices:
            raise ValueError(
                f"the mesh data {self.data} x {given} does not fit {available}: the product must be {devices}."
            )
        if devices % others:
            raise ValueError(f"the mesh {given} does not fit {available}: the product must divide {devices}.")
        room, windows = devices // others, batch // self.fsdp
        data = self.data or max(parts for parts in range(1, room + 1) if room % parts == 0 == windows % parts)
        return dict(zip(MeshAxis, (data, self.fsdp, self.context, self.tensor), strict=True))
