"""Tokens from a model: prompts are read in chunks, then tokens are decoded one at a time with a key-value cache."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ldm_jax.errors import UserError
from ldm_jax.infer.sampling import Sampling, SamplingValues, draw
from ldm_jax.nn import Transformer
from ldm_jax.nn.cache import Cache, init_cache

Graph = nnx.GraphDef[Transformer]


class DecodeState(NamedTuple):
    """The state of decoding between two tokens."""

    cache: Cache
    logits: Float[Array, "B S"]
    """Logits of the next token."""
    seen: Bool[Array, "B S"]
    """Which tokens have occurred in the sequence."""
    allowed: Bool[Array, "1 S"]
    """Which tokens may be drawn."""
    keys: Array
    """One random key per sequence."""


def generate(
    graph: Graph,
    params: object,
    prompts: Sequence[Sequence[int]],
    context: int,
    *,
    ids: Sequence[int] | Int[np.ndarray, " _"] | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    chunk: int = 128,
) -> Iterator[Int[np.ndarray, " B"]]:
    """An endless iterator over the next token of every sequence.

    A token attends to itself and to the `context - 1` tokens before it; only the last `context` tokens of a longer
    prompt are used. Except for rounding, a sequence does not depend on the other prompts.

    Args:
        graph: structure of the model.
        params: parameters of the model.
        prompts: token sequences of any lengths, at least one token each.
        context: number of tokens in the cache, for example the window that the model was trained on.
        ids: the tokens that may be drawn, such as `Tokenizer.ids`; those outside the vocabulary are ignored. None: all.
        sampling: how tokens are drawn.
        seed: seed of the draws, below 2^32.
        chunk: number of prompt tokens to compute at a time.

    Raises:
        ValueError: there is no prompt, a prompt is empty, a token is outside the vocabulary, no token may be drawn, or
            the seed, context or chunk is out of range.
        UserError: at a token, the logits are NaN.
    """
    state = read_prompts(graph, params, prompts, context, ids=ids, seed=seed, chunk=chunk)
    return _tokens(graph, params, state, (sampling or Sampling()).values)


def _tokens(
    graph: Graph, params: object, state: DecodeState, sampling: SamplingValues
) -> Iterator[Int[np.ndarray, " B"]]:
    next_token = token_step(graph)
    while True:
        tokens, state = next_token(params, state, sampling)
        if (drawn := np.asarray(tokens)).min() < 0:
            raise UserError("the logits of the model are not numbers (NaN): give another checkpoint.")
        yield drawn


def read_prompts(
    graph: Graph,
    params: object,
    prompts: Sequence[Sequence[int]],
    context: int,
    *,
    ids: Sequence[int] | Int[np.ndarray, " _"] | None = None,
    seed: int = 0,
    chunk: int = 128,
) -> DecodeState:
    """The state after the prompts. Shorter prompts are padded at the start; no token attends to the padding.

    Arguments and errors are those of `generate`.
    """
    if context < 1 or chunk < 1:
        raise ValueError(f"context is {context} and chunk is {chunk}, but both must be at least 1.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}, but it must lie in [0, 2^32).")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("a prompt is empty or missing: give at least one prompt, each with at least one token.")
    model = nnx.merge(graph, params)
    vocabulary = model.config.vocabulary
    arrays = [np.asarray(prompt, np.int32)[-context:] for prompt in prompts]
    for prompt in arrays:
        invalid = prompt[(prompt < 0) | (prompt >= vocabulary)]
        if invalid.size:
            raise ValueError(f"a prompt has the token {invalid[0]}, but tokens must lie in [0, {vocabulary}).")
    longest = max(len(prompt) for prompt in arrays)
    # Whole chunks, so that few lengths are compiled; if the cache is too small for that, the first chunk is shorter.
    length = min(-(-longest // chunk) * chunk, context)
    padded = np.zeros((len(arrays), length), np.int32)
    seen = np.zeros((len(arrays), vocabulary), bool)
    for row, prompt in enumerate(arrays):
        padded[row, length - len(prompt) :] = prompt
        seen[row, prompt] = True
    cache = init_cache(model.config, jnp.asarray([length - len(prompt) for prompt in arrays]), context)
    read_chunk, logits = _chunk_step(graph), jnp.zeros((len(arrays), vocabulary))
    for end in range(length % chunk or chunk, length + 1, chunk):
        logits, cache = read_chunk(params, jnp.asarray(padded[:, max(end - chunk, 0) : end]), cache)
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(len(arrays)))
    allowed = np.isin(np.arange(vocabulary), np.arange(vocabulary) if ids is None else ids)
    if not allowed.any():
        raise ValueError(f"ids has no token in [0, {vocabulary}): give the tokens that may be drawn, or None.")
    return DecodeState(cache, logits, jnp.asarray(seen), jnp.asarray(allowed[None]), keys)


@functools.cache
def _chunk_step(graph: Graph) -> Callable[[object, Array, Cache], tuple[Array, Cache]]:
    def read_chunk(params: object, tokens: Int[Array, "B T"], cache: Cache) -> tuple[Float[Array, "B S"], Cache]:
        model = nnx.merge(graph, params)
        hidden, cache = model.decode(tokens, cache)
        return model.logits(hidden[:, -1]).astype(jnp.float32), cache

    return jax.jit(read_chunk, donate_argnames="cache")


@functools.cache
def token_step(graph: Graph) -> Callable[[object, DecodeState, SamplingValues], tuple[Array, DecodeState]]:
    """The compiled step `(params, state, sampling) -> (tokens [B], state)`; the given state is donated."""

    def next_token(
        params: object, state: DecodeState, sampling: SamplingValues
    ) -> tuple[Int[Array, " B"], DecodeState]:
        model = nnx.merge(graph, params)
        keys = jax.vmap(jax.random.split)(state.keys)
        tokens = draw(sampling, state.logits, state.seen, state.allowed, keys[:, 0])
        hidden, cache = model.decode(tokens[:, None], state.cache)
        logits = model.logits(hidden[:, 0]).astype(jnp.float32)
        seen = state.seen.at[jnp.arange(len(tokens)), tokens].set(True)
        return tokens, DecodeState(cache, logits, seen, state.allowed, keys[:, 1])

    return jax.jit(next_token, donate_argnames="state")
