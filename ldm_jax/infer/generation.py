"""Text from a model, a token at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from ldm_jax.nn import Transformer


@partial(jax.jit, static_argnames=("graph", "count", "context", "temperature"))
def _continue(
    graph: nnx.GraphDef[Transformer],
    params: object,
    window: Int[Array, " context"],
    length: Int[Array, ""],
    key: jax.Array,
    count: int,
    context: int,
    temperature: float,
) -> Int[Array, " count"]:
    model = nnx.merge(graph, params)

    def step(
        carry: tuple[Int[Array, " context"], Int[Array, ""]], key: jax.Array
    ) -> tuple[tuple[Int[Array, " context"], Int[Array, ""]], Int[Array, ""]]:
        window, length = carry
        # What stands behind the last token is not seen: attention is causal.
        last = model.logits(model.hidden(window[None])[0, length - 1]).astype(jnp.float32)
        token = jnp.argmax(last) if temperature == 0 else jax.random.categorical(key, last / temperature)
        token = token.astype(window.dtype)
        full = length == context
        window = jnp.where(full, jnp.roll(window, -1), window)
        length = jnp.where(full, context - 1, length)
        return (window.at[length].set(token), length + 1), token

    return jax.lax.scan(step, (window, length), jax.random.split(key, count))[1]


def generate(
    graph: nnx.GraphDef[Transformer],
    params: object,
    prompt: bytes,
    count: int,
    context: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
) -> bytes:
    """`count` bytes that follow a prompt. The model sees the last `context` bytes of prompt and text.

    Args:
        graph: the model's structure.
        params: its parameters.
        prompt: at least one byte.
        count: at least 1.
        context: the window that the model was trained on.
        temperature: what scores are divided by before a token is drawn; 0 takes the likeliest token.
        seed: of the draws.

    Raises:
        ValueError: an empty prompt, a count below 1, or an inadmissible temperature or seed.
    """
    if not prompt:
        raise ValueError('the prompt is empty, but it needs at least one byte, such as "\\n".')
    if count < 1:
        raise ValueError(f"count is {count}, but it must be at least 1.")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}, but it must be finite and not negative.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}, but it must lie in [0, 2^32).")
    seen = np.frombuffer(prompt, np.uint8)[-context:]
    window = np.zeros(context, np.int32)
    window[: len(seen)] = seen
    key = jax.random.key(seed)
    tokens = _continue(
        graph, params, jnp.asarray(window), jnp.int32(len(seen)), key, count=count, context=context,
        temperature=temperature,
    )  # fmt: skip
    return np.asarray(tokens, np.uint8).tobytes()
