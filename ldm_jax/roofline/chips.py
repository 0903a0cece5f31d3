"""What the makers of TPUs publish of a chip."""

from typing import NamedTuple

from ldm_jax.errors import UserError
from ldm_jax.train.utilisation import PEAK_FLOPS


class ChipRates(NamedTuple):
    """Of one chip."""

    flops: float
    """Products in bfloat16, a second."""
    hbm_capacity: float
    """Of the main memory, bytes."""
    hbm_rate: float
    """Bytes a second from and to it."""
    link_rate: float
    """Bytes a second that it sends over all its links to other chips of the slice together."""
    outer_rate: float | None
    """The same to other slices, over its share of the host's network; None where it is not published."""


# https://cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e; of v4's links Jouppi et al., arXiv 2304.01433. Published rates
# of links count both directions: half of that is sent.
_RATES = {
    "TPU v4": (32 * 2**30, 1200e9, 300e9, None),
    "TPU v5 lite": (16 * 2**30, 819e9, 200e9, 3.125e9),
    "TPU v5": (95 * 2**30, 2765e9, 600e9, 6.25e9),
    "TPU v6 lite": (32 * 2**30, 1638e9, 400e9, 12.5e9),
}


def chip_rates(kind: str) -> ChipRates:
    """The rates of a chip by JAX's name for its kind, such as "TPU v5 lite". Raises UserError for others."""
    if kind not in _RATES:
        raise UserError(f"the rates of {kind} are not known: known are {', '.join(_RATES)}.")
    return ChipRates(PEAK_FLOPS[kind], *_RATES[kind])
