"""A trained model, for use in Python."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Integer

from ldm_jax.config import Config
from ldm_jax.convert import read_model
from ldm_jax.data import MissingTokenizer, Tokenizer, tokenizer_from_files
from ldm_jax.infer.completion import complete
from ldm_jax.infer.sampling import Sampling
from ldm_jax.nn import Params, Transformer, model_graph
from ldm_jax.typing import AnyArray, Logits, Scalar


@dataclass(frozen=True)
class Model:
    """A checkpoint, ready for use; `nnx.merge(graph, params)` is the flax module."""

    path: Path
    """Directory of the run or of the exported model."""
    config: Config
    graph: nnx.GraphDef[Transformer]
    params: Params
    """Float32 arrays."""
    tokenizer: Tokenizer
    step: int
    averaged: bool
    """Whether the parameters are a moving average (`optimizer.ema`)."""
    corpus: str
    """Fingerprint of the corpus that the model was trained on; empty if it was imported and has not been trained."""

    @property
    def start(self) -> tuple[int, ...]:
        """The tokens before a text: those of the tokenizer, such as Llama's `<s>`, until the model is trained here.

        Training data has no such tokens.
        """
        return () if self.corpus else self.tokenizer.start

    def logits(self, tokens: Integer[AnyArray, "B T"]) -> Logits:
        """The logits of the next token at every position, `[B, T, S]`, float32. Compiled for every shape `[B, T]`.

        Raises:
            ValueError: the tokens are not integers `[B, T]` of the vocabulary, or there is none.
        """
        return _logits(self.graph)(self.params, self._checked(tokens, least=1))

    def loss(self, tokens: Integer[AnyArray, "B T"]) -> Scalar:
        """The mean cross-entropy of every token `[B, T]` but the first, in nats, float32.

        Raises:
            ValueError: as `logits`, or a row has only one token.
        """
        return _loss(self.graph)(self.params, self._checked(tokens, least=2))

    def _checked(self, tokens: Integer[AnyArray, "B T"], least: int) -> Array:
        """The tokens, of which every row has at least so many. Those of a traced array are not checked."""
        tokens, vocabulary = jnp.asarray(tokens), self.config.model.vocabulary
        if (
            tokens.ndim != 2
            or len(tokens) < 1
            or tokens.shape[1] < least
            or not jnp.issubdtype(tokens.dtype, jnp.integer)
        ):
            raise ValueError(
                f"the tokens are {tokens.dtype} of shape {tokens.shape}, but they must be integers of shape [B, T], "
                f"with T at least {least}."
            )
        if not isinstance(tokens, Tracer):
            for token in (int(tokens.min()), int(tokens.max())):
                if not 0 <= token < vocabulary:  # which JAX would clip, or make NaN
                    raise ValueError(f"the tokens have {token}, but tokens must lie in [0, {vocabulary}).")
        return tokens

    def generate(
        self,
        prompts: Sequence[str],
        count: int = 300,
        *,
        sampling: Sampling | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        context: int | None = None,
    ) -> list[str]:
        """The continuations of prompts, by at most `count` tokens each; `complete` streams them.

        Args:
            prompts: texts, which are computed as one batch. An empty one is the start of a document.
            count: most tokens after a prompt.
            sampling: how tokens are drawn.
            seed: seed of the draws.
            stop: strings that end a text; they are left out.
            context: the number of tokens that a token attends to, itself included. None: `data.context`.

        Raises:
            UserError, ValueError: as `complete`.
        """
        window = self.config.data.context if context is None else context
        pieces = complete(
            self.graph, self.params, self.tokenizer, prompts, window, count,
            sampling=sampling, seed=seed, stop=stop, start=self.start,
        )  # fmt: skip
        return [b"".join(parts).decode(errors="replace") for parts in zip(*pieces, strict=True)]


def load_model(path: str | PathLike[str], mesh: Mesh | None = None) -> Model:
    """Loads a trained model.

    Args:
        path: RUN, the directory of a run, for its last checkpoint; RUN@STEP for that of a step; or the directory of an
            exported model or a Hugging Face checkpoint. It does not change.
        mesh: where the parameters are placed; None for one device. All processes of a job call this together.

    Raises:
        UserError: the directory holds no model, or the run has no such checkpoint.
    """
    directory, config, (step, params, averaged, progress) = read_model(Path(path), mesh)
    files = progress.tokenizer
    tokenizer = tokenizer_from_files(files) if files else MissingTokenizer(config.model.vocabulary)
    graph = model_graph(config.model, config.mixer)
    return Model(directory, config, graph, params, tokenizer, step, averaged, progress.corpus)


@functools.cache
def _logits(graph: nnx.GraphDef[Transformer]) -> Callable[[Params, Array], Array]:
    return jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))


@functools.cache
def _loss(graph: nnx.GraphDef[Transformer]) -> Callable[[Params, Array], Array]:
    return jax.jit(lambda params, tokens: nnx.merge(graph, params).loss(tokens[:, :-1], tokens[:, 1:]))
