"""Log-likelihoods of tokens after a context of any length, computed in batches of windows of similar length."""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, Int32
from rich.console import Console
from rich.progress import track

from ldm_jax.errors import UserError
from ldm_jax.infer.model import Model
from ldm_jax.nn import Transformer

SHORTEST = 32
"""Windows are padded to this many tokens, to a larger power of two, or to the context."""


class Window(NamedTuple):
    """At most T + 1 tokens, for a context of T."""

    tokens: Int32[np.ndarray, " tokens"]
    scored: int
    """Number of the last tokens that are scored, each given all tokens before it."""


class Scores(NamedTuple):
    """The scores of consecutive tokens."""

    log_likelihoods: Float32[np.ndarray, " tokens"]
    """`log softmax(logits)[token]`, in nats."""
    are_greedy: Bool[np.ndarray, " tokens"]
    """Whether greedy decoding would choose each token."""


def cut_windows(before: Sequence[int], tokens: Sequence[int], context: int) -> list[Window]:
    """Windows that score each of the tokens once, after the tokens `before` them (at least one).

    Every window is as long as the context allows. So the last one starts with tokens that the one before it has scored.
    """
    sequence = np.array([*before, *tokens], np.int32)
    starts = range(len(before), len(sequence), context)
    ends = [min(start + context, len(sequence)) for start in starts]
    return [
        Window(sequence[max(0, end - context - 1) : end], end - start) for start, end in zip(starts, ends, strict=True)
    ]


def score_windows(model: Model, windows: Sequence[Window], batch_size: int) -> list[Scores]:
    """The scores of the windows, in float32. Except for rounding, they do not depend on the batch size.

    Windows are padded to few lengths, so that few programs are compiled.

    Raises:
        UserError: a score is NaN.
    """
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    for index, window in enumerate(windows):
        by_length[_padded_length(len(window.tokens) - 1, model.config.data.context)].append(index)
    batches = [
        (length, indices[start : start + batch_size])
        for length, indices in sorted(by_length.items(), reverse=True)  # the longest need most memory
        for start in range(0, len(indices), batch_size)
    ]
    token_scores, scores = _token_scores(model.graph), {}
    console = Console(stderr=True)
    for length, batch in track(batches, "scoring", console=console, transient=True, disable=not console.is_terminal):
        tokens = np.zeros((batch_size, length + 1), np.int32)
        for row, index in enumerate(batch):
            tokens[row, : len(windows[index].tokens)] = windows[index].tokens
        logs, greedy = map(np.asarray, token_scores(model.params, jnp.asarray(tokens)))
        for row, index in enumerate(batch):
            end = len(windows[index].tokens) - 1
            scored = slice(end - windows[index].scored, end)
            scores[index] = Scores(logs[row, scored], greedy[row, scored])
            if np.isnan(scores[index].log_likelihoods).any():  # with which lm-eval counts a first choice as right
                raise UserError("the logits of the model are not numbers (NaN): give another checkpoint.")
    return [scores[index] for index in range(len(windows))]


def score_continuations(
    model: Model, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], batch_size: int
) -> list[tuple[float, bool]]:
    """The log-likelihood of every continuation, and whether all its tokens are greedy.

    Args:
        model: a trained model.
        pairs: a context of at least one token and its continuation. A context that is too long for one window with the
            continuation is cut at its start; a continuation that is too long is scored in several windows.
        batch_size: windows per batch.
    """
    cut = [cut_windows(before, tokens, model.config.data.context) for before, tokens in pairs]
    scores = iter(score_windows(model, [window for windows in cut for window in windows], batch_size))
    results = []
    for windows in cut:
        parts = [next(scores) for _ in windows]
        log_likelihood = float(sum(part.log_likelihoods.sum(dtype=np.float64) for part in parts))
        results.append((log_likelihood, all(part.are_greedy.all() for part in parts)))
    return results


def _padded_length(length: int, context: int) -> int:
    return min(max(SHORTEST, 1 << (length - 1).bit_length()), context)


@functools.cache
def _token_scores(
    graph: nnx.GraphDef[Transformer],
) -> Callable[[object, Array], tuple[Float[Array, "B T"], Bool[Array, "B T"]]]:
    def token_scores(
        params: object, tokens: Int[Array, "B T_and_next"]
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        model, targets = nnx.merge(graph, params), tokens[:, 1:]
        hidden = model.hidden(tokens[:, :-1])

        def score(token: tuple[Float[Array, " D"], Int[Array, ""]]) -> tuple[Float[Array, ""], Bool[Array, ""]]:
            state, target = token
            logits = model.logits(state).astype(jnp.float32)
            return jax.nn.log_softmax(logits)[target], jnp.argmax(logits) == target

        # The logits of at most `loss_chunk` tokens at a time.
        flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        scores = jax.lax.map(score, flat, batch_size=model.config.loss_chunk)
        return jax.tree.map(lambda x: x.reshape(targets.shape), scores)

    return jax.jit(token_scores)
