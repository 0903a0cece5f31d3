"""How the layers that write into the stream start."""

from flax import nnx

from ldm_jax.config import ModelConfig


def branch_output(inputs: int, width: int, config: ModelConfig, rngs: nnx.Rngs) -> nnx.Linear:
    """A branch's last projection, started smaller by `sqrt(2 depth)`, so that the stream's size is free of depth."""
    scale = nnx.initializers.variance_scaling(1 / (2 * config.depth), "fan_in", "truncated_normal")
    return nnx.Linear(inputs, width, use_bias=False, kernel_init=scale, dtype=config.dtype, rngs=rngs)
