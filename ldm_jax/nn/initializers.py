"""Initialisation of the layers that write to the stream."""

from flax import nnx

from ldm_jax.config import ModelConfig
from ldm_jax.parameters import linear
from ldm_jax.sharding import Axis


def branch_output(inputs: int, axis: Axis, config: ModelConfig, rngs: nnx.Rngs) -> nnx.Linear:
    """A branch's output projection, scaled by `1 / sqrt(2 depth)` so that the stream does not grow with depth."""
    scale = nnx.initializers.variance_scaling(1 / (2 * config.depth), "fan_in", "truncated_normal")
    return linear(inputs, config.width, (axis, Axis.WIDTH), kernel_init=scale, dtype=config.dtype, rngs=rngs)
