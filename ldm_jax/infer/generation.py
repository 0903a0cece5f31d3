"""Tokens from a model: prompts in chunks, then a token at a time, with a cache of keys and values."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ldm_jax.infer.sampling import Sampling, draw
from ldm_jax.nn import Transformer
from ldm_jax.nn.cache import Cache, init_cache

Graph = nnx.GraphDef[Transformer]


class DecodeState(NamedTuple):
    """All that the next token depends on."""

    cache: Cache
    logits: Float[Array, "B S"]
    """Scores of the next token."""
    seen: Bool[Array, "B S"]
    """Tokens that have occurred."""
    keys: Array
    """A random key for each sequence."""


def generate(
    graph: Graph,
    params: object,
    prompts: Sequence[Sequence[int]],
    context: int,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    chunk: int = 128,
) -> Iterator[Int[np.ndarray, " B"]]:
    """Endlessly, the next token of every prompt. Take as many as wanted.

    A token sees itself and the `context - 1` before it, wherever they stand; of a longer prompt the last `context`
    tokens are used. What a sequence gets does not depend on the prompts beside it, but for rounding.

    Args:
        graph: the model's structure.
        params: its parameters.
        prompts: of any lengths, at least one token each.
        context: places that the cache has, such as the window that the model was trained on.
        sampling: how tokens are drawn.
        seed: of the draws; below 2^32.
        chunk: tokens of the prompts that are computed at a time.

    Raises:
        ValueError: no prompt, an empty one, a token outside the vocabulary, or a seed, context or chunk out of range.
    """
    next_token = token_step(graph, sampling or Sampling())
    state = read_prompts(graph, params, prompts, context, seed=seed, chunk=chunk)
    return _tokens(next_token, params, state)


def _tokens(
    next_token: Callable[..., tuple[Array, DecodeState]], params: object, state: DecodeState
) -> Iterator[Int[np.ndarray, " B"]]:
    while True:
        tokens, state = next_token(params, state)
        yield np.asarray(tokens)


def read_prompts(
    graph: Graph, params: object, prompts: Sequence[Sequence[int]], context: int, *, seed: int = 0, chunk: int = 128
) -> DecodeState:
    """The state after the prompts. They end at one place; the shorter ones begin with padding, which nothing sees.

    Arguments and errors as in `generate`.
    """
    if context < 1 or chunk < 1:
        raise ValueError(f"context is {context} and chunk {chunk}, but both must be at least 1.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}, but it must lie in [0, 2^32).")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("a prompt is empty, but it needs at least one token.")
    model = nnx.merge(graph, params)
    vocabulary = model.config.vocabulary
    kept = [np.asarray(prompt, np.int32)[-context:] for prompt in prompts]
    for prompt in kept:
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            raise ValueError(f"a prompt has the token {prompt.max()}, but the vocabulary ends at {vocabulary - 1}.")
    longest = max(len(prompt) for prompt in kept)
    # Whole chunks, so that few lengths are compiled; where the cache has no room for that, a shorter chunk is first.
    length = min(-(-longest // chunk) * chunk, context)
    padded = np.zeros((len(kept), length), np.int32)
    seen = np.zeros((len(kept), vocabulary), bool)
    for row, prompt in enumerate(kept):
        padded[row, length - len(prompt) :] = prompt
        seen[row, prompt] = True
    cache = init_cache(model.config, jnp.asarray([length - len(prompt) for prompt in kept]), context)
    read_chunk, logits = _chunk_step(graph), jnp.zeros((len(kept), vocabulary))
    for start, end in _pieces(length, chunk):
        logits, cache = read_chunk(params, jnp.asarray(padded[:, start:end]), cache)
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(len(kept)))
    return DecodeState(cache, logits, jnp.asarray(seen), keys)


def _pieces(length: int, chunk: int) -> list[tuple[int, int]]:
    """The first piece is shorter where chunks do not fill the length."""
    ends = range(length % chunk or chunk, length + 1, chunk)
    return [(max(end - chunk, 0), end) for end in ends]


@functools.cache
def _chunk_step(graph: Graph) -> Callable[[object, Array, Cache], tuple[Array, Cache]]:
    def read_chunk(params: object, tokens: Int[Array, "B T"], cache: Cache) -> tuple[Float[Array, "B S"], Cache]:
        model = nnx.merge(graph, params)
        hidden, cache = model.decode(tokens, cache)
        return model.logits(hidden[:, -1]).astype(jnp.float32), cache

    return jax.jit(read_chunk, donate_argnames="cache")


@functools.cache
def token_step(graph: Graph, sampling: Sampling) -> Callable[[object, DecodeState], tuple[Array, DecodeState]]:
    """The compiled step `(params, state) -> (tokens [B], state)`; the state given is used up."""

    def next_token(params: object, state: DecodeState) -> tuple[Int[Array, " B"], DecodeState]:
        model = nnx.merge(graph, params)
        keys = jax.vmap(jax.random.split)(state.keys)
        tokens = draw(sampling, state.logits, state.seen, keys[:, 0])
        hidden, cache = model.decode(tokens[:, None], state.cache)
        logits = model.logits(hidden[:, 0]).astype(jnp.float32)
        seen = state.seen.at[jnp.arange(len(tokens)), tokens].set(True)
        return tokens, DecodeState(cache, logits, seen, keys[:, 1])

    return jax.jit(next_token, donate_argnames="state")
