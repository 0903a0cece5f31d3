"""How the next token is drawn from the model's scores."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ldm_jax.options import check_option_types


@dataclass(frozen=True)
class Sampling:
    """Filters, applied in the order of the fields; the defaults let every token through."""

    repetition_penalty: float = 1.0
    """What the scores of tokens that have occurred are divided by (multiplied, if negative); Keskar et al., arXiv
    1909.05858. 1: no penalty."""
    temperature: float = 0.8
    """What scores are divided by. 0 takes the likeliest token."""
    top_k: int | None = None
    """Only the k likeliest tokens. None: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability (Holtzman et al., arXiv 1904.09751)."""
    min_p: float = 0.0
    """Only tokens at least this many times as likely as the likeliest (Nguyen et al., arXiv 2407.01082)."""

    def __post_init__(self) -> None:
        check_option_types(self)

        def check(name: str, admissible: bool, allowed: str) -> None:
            if not admissible:
                raise ValueError(f"{name} is {getattr(self, name)}, but it must {allowed}.")

        check("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "lie in [0.01, 100]")
        temperature = self.temperature
        check("temperature", temperature == 0 or 1e-4 <= temperature < math.inf, "be 0, or at least 1e-4 and finite")
        check("top_k", self.top_k is None or self.top_k >= 1, "be at least 1")
        check("top_p", 0 < self.top_p <= 1, "lie in (0, 1]")
        check("min_p", 0 <= self.min_p <= 1, "lie in [0, 1]")


def filtered_logits(sampling: Sampling, logits: Float[Array, "B S"], seen: Bool[Array, "B S"]) -> Float[Array, "B S"]:
    """Logits whose softmax the token is drawn from; `-inf` where a token is not let through. Float32.

    Ties with the last token that top_k lets through pass, too, and the likeliest token always does.
    """
    logits = logits.astype(jnp.float32)
    penalty = sampling.repetition_penalty
    if penalty != 1:
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if sampling.top_p < 1:
        descending = jnp.sort(logits, axis=-1, descending=True)
        likelier = jnp.cumsum(jax.nn.softmax(descending), axis=-1) - jax.nn.softmax(descending)
        within = (likelier < sampling.top_p).at[:, 0].set(True)
        least = jnp.min(jnp.where(within, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if sampling.min_p > 0:
        least = jnp.max(logits, axis=-1, keepdims=True) + math.log(sampling.min_p)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits


def draw(sampling: Sampling, logits: Float[Array, "B S"], seen: Bool[Array, "B S"], keys: Array) -> Int[Array, " B"]:
    """A token for each sequence, by a random key of its own."""
    logits = filtered_logits(sampling, logits, seen)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
