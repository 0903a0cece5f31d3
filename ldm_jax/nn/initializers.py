"""How the layers that write into the stream start."""

from flax import nnx

from ldm_jax.config import ModelConfig
from ldm_jax.parameters import linear
from ldm_jax.sharding import Axis


def branch_output(inputs: int, axis: Axis, config: ModelConfig, rngs: nnx.Rngs) -> nnx.Linear:
    """A branch's last projection, started smaller by `sqrt(2 depth)`, so that the stream's size is free of depth."""
    scale = nnx.initializers.variance_scaling(1 / (2 * config.depth), "fan_in", "truncated_normal")
    return linear(inputs, config.width, (axis, Axis.WIDTH), kernel_init=scale, dtype=config.dtype, rngs=rngs)
