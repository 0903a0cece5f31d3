"""The gated MLP (SwiGLU; Shazeer, arXiv 2002.05202)."""

import jax
from flax import nnx

from ldm_jax.config import ModelConfig
from ldm_jax.nn.initializers import branch_output
from ldm_jax.parameters import linear
from ldm_jax.sharding import Axis, constrain
from ldm_jax.typing import Hidden


class MLP(nnx.Module):
    """`W_out (silu(W_gate x) * W_up x)` with hidden width F."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, hidden, dtype = config.width, config.mlp_width, config.dtype
        self.gate = linear(width, hidden, (Axis.WIDTH, Axis.HIDDEN), dtype=dtype, rngs=rngs)
        self.up = linear(width, hidden, (Axis.WIDTH, Axis.HIDDEN), dtype=dtype, rngs=rngs)
        self.out = branch_output(hidden, Axis.HIDDEN, config, rngs)

    def __call__(self, x: Hidden) -> Hidden:
        """The MLP output `[B, T, D]`."""
        hidden = jax.nn.silu(self.gate(x)) * self.up(x)
        return self.out(constrain(hidden, Axis.BATCH, Axis.TOKENS, Axis.HIDDEN))
