"""Published rates of TPU chips."""

from typing import NamedTuple

from ldm_jax.errors import UserError
from ldm_jax.train.utilisation import PEAK_FLOPS


class ChipRates(NamedTuple):
    """Of one chip; rates are per second."""

    flops: float
    """Peak of bfloat16 matmuls."""
    hbm_capacity: float
    """Bytes."""
    hbm_rate: float
    """Bytes read or written."""
    ici_rate: float
    """Bytes sent over all links to other chips of the slice (the inter-chip interconnect) together."""
    dcn_rate: float | None
    """Bytes sent to other slices: a chip's share of its host's data-center network. None: not published."""


# https://cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e; v4's links: Jouppi et al., arXiv 2304.01433. Published link
# rates count both directions; half of them is the rate of sending.
_RATES = {
    "TPU v4": (32 * 2**30, 1200e9, 300e9, None),
    "TPU v5 lite": (16 * 2**30, 819e9, 200e9, 3.125e9),
    "TPU v5": (95 * 2**30, 2765e9, 600e9, 6.25e9),
    "TPU v6 lite": (32 * 2**30, 1638e9, 400e9, 12.5e9),
}


def chip_rates(kind: str) -> ChipRates:
    """The rates of a chip by JAX's `device_kind`, such as "TPU v5 lite". Raises UserError for an unknown kind."""
    if kind not in _RATES:
        raise UserError(f'the rates of the chip "{kind}" are unknown; the known chips are {", ".join(_RATES)}.')
    return ChipRates(PEAK_FLOPS[kind], *_RATES[kind])
