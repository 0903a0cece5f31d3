"""A depth memory with what it learns: reader, writer and forgetting. Its mathematics is in `ldm_jax.memory`.

The memory is per token. Nothing here looks from one token to another, so causality is untouched.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ldm_jax.mixers.depth_memory_config import DepthMemoryConfig, check_width
from ldm_jax.mixers.memory_form import AnyState, Dual, DualState, Kept, check_memory, make_form
from ldm_jax.mixers.reader_writer import Forgetting, Reader, Writer
from ldm_jax.typing import DType


class DepthMemory(nnx.Module):
    """One layer's reader, writer and forgetting, to be added to any flax model; the state is passed by hand.

        self.memory = DepthMemory(width, sublayers, rngs=rngs)          # in each layer
        x = h + self.memory.read(state, h)                              # what the layer is given
        state = self.memory.write(state, output)                        # what the layer has made of it

    The first state comes from `init_memory`. `sublayers` is how many writes a token will see: the default floor of
    forgetting depends on it.

    Raises:
        ValueError: a width that the groups do not divide, or no sublayer.
    """

    def __init__(
        self,
        width: int,
        sublayers: int,
        config: DepthMemoryConfig = DepthMemoryConfig(),
        *,
        dtype: DType = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_width(width, config)
        if sublayers < 1:
            raise ValueError(f"sublayers is {sublayers}, but it must be at least 1.")
        self.config = config
        floor = 1e-3 ** (1 / sublayers) if config.forgetting_floor is None else config.forgetting_floor
        self.reader = Reader(width, config, dtype=dtype, rngs=rngs)
        self.writer = Writer(width, config, dtype=dtype, rngs=rngs)
        self.forgetting = Forgetting(config.groups, floor)

    def read(self, state: AnyState, context: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        """`gain_g * gate_g * M_g q_g` over the groups, query and gate computed from the context `h`."""
        return self.reader(state, context)

    def write(self, state: AnyState, output: Float[Array, "*tokens D"]) -> AnyState:
        """The state after the observation of an output, whose key and importance are computed from it."""
        return self.record(state, output)[0]

    def record(self, state: AnyState, output: Float[Array, "*tokens D"]) -> tuple[AnyState, Kept | None]:
        """`write`, and what `undo` needs to have the state before it again."""
        check_memory(state, output, self.config)
        return make_form(self.config).write(state, self.writer(output, self.forgetting()))

    def undo(self, state: AnyState, kept: Kept | None) -> AnyState:
        """The state before a `record`, from the state after it. The writes additive and delta have none."""
        return make_form(self.config).undo(state, kept, self.forgetting())

    def weights(self, state: DualState, context: Float[Array, "*tokens D"]) -> Float[Array, "N *tokens G"]:
        """What every observation so far contributes to a read: the readout is the sum of the values times these.

        For the dual form. Gate and gain are included.
        """
        if not isinstance(state, DualState):
            raise ValueError("the form is recurrent, which has no weights: set form to dual. The numbers are the same.")
        query, scale = self.reader.ask(context)
        return scale * jnp.asarray(Dual(self.config.write).weights(state, query))


def init_memory(
    tokens: tuple[int, ...],
    width: int,
    config: DepthMemoryConfig = DepthMemoryConfig(),
    *,
    depth: int | None = None,
    dtype: DType = jnp.float32,
) -> AnyState:
    """The state before the first write, for an array of tokens: `tokens` is `(B, T)`, or any other leading shape.

    Args:
        tokens: the leading shape.
        width: D.
        config: the options of the `DepthMemory`.
        depth: of the dual form, how many writes there will be, where a `jax.lax.scan` carries the state; without it the
            state grows from write to write.
        dtype: of the dual form, the type of the values.

    Raises:
        ValueError: a width that the groups do not divide.
    """
    check_width(width, config)
    shape = config.groups, width // config.groups, config.key_dim
    return make_form(config, depth).start(tokens, *shape, config.alpha, dtype)
