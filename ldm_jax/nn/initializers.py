"""Layers that are made in several places."""

from flax import nnx

from ldm_jax.config import ModelConfig
from ldm_jax.parameters import linear
from ldm_jax.sharding import Axis


def branch_output(
    inputs: int, axis: Axis, config: ModelConfig, rngs: nnx.Rngs, *, use_bias: bool = False
) -> nnx.Linear:
    """A branch's output projection, scaled by `1 / sqrt(2 depth)` so that the stream does not grow with depth."""
    scale = nnx.initializers.variance_scaling(1 / (2 * config.depth), "fan_in", "truncated_normal")
    axes = axis, Axis.WIDTH
    return linear(inputs, config.width, axes, use_bias=use_bias, kernel_init=scale, dtype=config.dtype, rngs=rngs)


def rms_norm(width: int, config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """An RMSNorm with a learned scale."""
    return nnx.RMSNorm(width, epsilon=config.norm_eps, dtype=config.dtype, rngs=rngs)
