"""Sampling of the next token from logits."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ldm_jax.options import check, check_option_types


class SamplingValues(NamedTuple):
    """The numbers of a `Sampling` as arrays, so that a program is compiled once for all of them."""

    repetition_penalty: Float[Array, ""]
    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]
    min_p: Float[Array, ""]


@dataclass(frozen=True)
class Sampling:
    """Filters of the logits, applied in the order of the fields. The defaults allow every token."""

    repetition_penalty: float = 1.0
    """Positive logits of tokens that have occurred are divided by this, negative ones multiplied; Keskar et al., arXiv
    1909.05858. 1: no penalty."""
    temperature: float = 0.8
    """Logits are divided by this. 0: greedy decoding."""
    top_k: int | None = None
    """Allow only the k most likely tokens. None: all."""
    top_p: float = 1.0
    """Allow only the most likely tokens that together have this probability; Holtzman et al., arXiv 1904.09751."""
    min_p: float = 0.0
    """Allow only tokens whose probability is at least this fraction of the largest; Nguyen et al., arXiv 2407.01082."""

    def __post_init__(self) -> None:
        check_option_types(self)

        for name, valid, allowed in (
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "lie in [0.01, 100]"),
            (
                "temperature",
                self.temperature == 0 or 1e-4 <= self.temperature < math.inf,
                "be 0, or finite and at least 1e-4",
            ),
            ("top_k", self.top_k is None or self.top_k >= 1, "be at least 1"),
            ("top_p", 0 < self.top_p <= 1, "lie in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "lie in [0, 1]"),
        ):
            check(valid, f"{name} is {getattr(self, name)}, but it must {allowed}.")

    @property
    def values(self) -> SamplingValues:
        """The options as arrays."""
        largest = int(jnp.iinfo(jnp.int32).max)
        return SamplingValues(
            jnp.float32(self.repetition_penalty),
            jnp.float32(self.temperature),
            jnp.int32(largest if self.top_k is None else min(self.top_k, largest)),
            jnp.float32(self.top_p),
            jnp.float32(self.min_p),
        )


def filtered_logits(
    sampling: SamplingValues, logits: Float[Array, "B S"], seen: Bool[Array, "B S"]
) -> Float[Array, "B S"]:
    """The float32 logits that a token is sampled from, with `-inf` for tokens that are not allowed.

    Tokens that tie with the last one allowed by `top_k` are allowed, too. The most likely token is always allowed.
    """
    logits, penalty, temperature = logits.astype(jnp.float32), sampling.repetition_penalty, sampling.temperature
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = logits / jnp.where(temperature > 0, temperature, 1)
    threshold = jax.lax.cond(  # the sort takes time, so it is left out if no option needs it
        (sampling.top_k < logits.shape[-1]) | (sampling.top_p < 1),
        lambda: _smallest_allowed(sampling, logits),
        lambda: jnp.full_like(logits[:, :1], -jnp.inf),
    )
    threshold = jnp.maximum(threshold, jnp.max(logits, axis=-1, keepdims=True) + jnp.log(sampling.min_p))
    return jnp.where(logits < threshold, -jnp.inf, logits)


def _smallest_allowed(sampling: SamplingValues, logits: Float[Array, "B S"]) -> Float[Array, "B 1"]:
    """The smallest logit that `top_k` and `top_p` allow."""
    descending = jnp.sort(logits, axis=-1, descending=True)
    last = jnp.minimum(sampling.top_k, logits.shape[-1]) - 1
    smallest = jax.lax.dynamic_slice_in_dim(descending, last, 1, axis=-1)
    descending = jnp.where(descending < smallest, -jnp.inf, descending)
    probabilities = jax.nn.softmax(descending)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    within = ((before < sampling.top_p) | (sampling.top_p >= 1)).at[:, 0].set(True)
    return jnp.maximum(smallest, jnp.min(jnp.where(within, descending, jnp.inf), axis=-1, keepdims=True))


def draw(
    sampling: SamplingValues,
    logits: Float[Array, "B S"],
    seen: Bool[Array, "B S"],
    allowed: Bool[Array, "1 S"],
    keys: Array,
) -> Int[Array, " B"]:
    """Samples one of the allowed tokens per sequence, each with its own random key; -1 if a logit is NaN."""
    logits = filtered_logits(sampling, jnp.where(allowed, logits, -jnp.inf), seen)
    tokens = jax.lax.cond(
        sampling.temperature > 0,
        lambda: jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32),
        lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
    )
    return jnp.where(jnp.isnan(logits).any(axis=-1), -1, tokens)
