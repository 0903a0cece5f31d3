"""Utilisation of the hardware: model flops relative to the chips' peak, and device memory."""

import jax

from ldm_jax.config import Config, TrainedPart
from ldm_jax.nn import count_parameters, init_params

PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}
"""Dense bfloat16 flops per second of a chip, by the beginning of its name. Source: the vendors' data sheets."""


def model_flops_per_token(config: Config) -> float:
    """Flops of forward and backward pass, `6 (parameters in matmuls) + 12 depth H C T`.

    A frozen parameter counts 4, because its own gradient is not computed.

    The embedding counts only where it is used as the head. The depth memory's state and everything that is computed
    again in the backward pass do not count. Source: Chowdhery et al., arXiv 2204.02311, appendix B.
    """
    model = config.model
    counts = count_parameters(jax.eval_shape(lambda: init_params(model, config.mixer, 0)))
    head = model.width * model.vocabulary
    attention = model.depth * model.heads * model.head_dim_or_default * config.data.context
    frozen = 4.0 if config.optimizer.train is TrainedPart.MIXER else 6.0
    return 6.0 * counts["mixer"] + frozen * (counts["blocks"] + head) + 12.0 * attention


def peak_flops(devices: int) -> float | None:
    """Peak flops per second of so many devices of this machine's kind; None for an unknown kind."""
    kind = jax.devices()[0].device_kind
    matches = [name for name in PEAK_FLOPS if kind.startswith(name)]
    return PEAK_FLOPS[max(matches, key=len)] * devices if matches else None


def device_memory_bytes() -> int | None:
    """Peak memory use of the first local device; None where JAX does not report it."""
    statistics = jax.local_devices()[0].memory_stats()
    return None if statistics is None else statistics.get("peak_bytes_in_use")
