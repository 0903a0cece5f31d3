"""Text from a model: prompts and what follows them, as it grows."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from ldm_jax.data import Tokenizer
from ldm_jax.infer.generation import Graph, generate
from ldm_jax.infer.sampling import Sampling

CONTEXT = 16
"""Tokens of the prompt that a continuation is decoded with."""
_UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


class Completion:
    """The text that follows a prompt. It ends before a stop string, or where the model ends the document."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[bytes] = (), prompt: Sequence[int] = ()):
        self._tokenizer, self._stop = tokenizer, [word for word in stop if word]
        # Some tokenisers leave out a space before the first token: it is not the first if the prompt stands before it.
        self._tokens = list(prompt[-CONTEXT:])
        self._before = len(tokenizer.decode(self._tokens))
        self.text = b""
        """What is certain so far: it is no beginning of a stop string."""
        self.finished = False

    def add(self, token: int) -> bytes:
        """Takes in the next token; returns the bytes that have become certain. Once finished, it changes no more."""
        if self.finished:
            return b""
        if token == self._tokenizer.end_of_document:
            return self.finish()
        self._tokens.append(token)
        text = self._decode()
        places = [place for word in self._stop if (place := text.find(word)) >= 0]
        self.finished = bool(places)
        return self._settle(text, min(places) if places else len(text) - self._undecided(text))

    def finish(self) -> bytes:
        """Ends the text here; returns the bytes that were still held back."""
        if self.finished:
            return b""
        self.finished = True
        text = self._decode()
        return self._settle(text, len(text))

    def _decode(self) -> bytes:
        return self._tokenizer.decode(self._tokens)[self._before :]

    def _settle(self, text: bytes, end: int) -> bytes:
        new = text[len(self.text) : end]
        self.text += new
        return new

    def _undecided(self, text: bytes) -> int:
        """Length of the longest end of the text that a stop string, or a character, may begin with."""
        beginnings = [word[:length] for word in self._stop for length in range(1, len(word))]
        # Of a character whose bytes are tokens, some tokenisers show one such sign for each that has come.
        beginnings += [_UNKNOWN * number for number in range(1, 4)]
        return max((len(start) for start in beginnings if text.endswith(start)), default=0)


def complete(
    graph: Graph,
    params: object,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    context: int,
    count: int,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> Iterator[list[bytes]]:
    """At most `count` tokens of text after every prompt: with each token, the bytes that have become certain.

    The pieces of a prompt, joined, are its text. An empty prompt is the start of a document. It ends early when all
    texts have met a stop string, which is left out, or the end of their document.

    Raises:
        ValueError: a count below 1, no prompt, an empty stop string; otherwise as `generate`.
    """
    if count < 1:
        raise ValueError(f"the number of tokens is {count}, but it must be at least 1.")
    if not prompts:
        raise ValueError("there is no prompt: give at least one.")
    if "" in stop:
        raise ValueError("a stop string is empty, but it needs at least one character.")
    ids = [tokenizer.encode(prompt).tolist() or [tokenizer.end_of_document] for prompt in prompts]
    words = [word.encode(errors="surrogateescape") for word in stop]
    texts = [Completion(tokenizer, words, prompt) for prompt in ids]
    tokens = generate(graph, params, ids, context, sampling=sampling, seed=seed)
    return _pieces(texts, tokens, count)


def _pieces(texts: Sequence[Completion], tokens: Iterator[Int[np.ndarray, " B"]], count: int) -> Iterator[list[bytes]]:
    for _ in range(count):
        yield [text.add(int(token)) for text, token in zip(texts, next(tokens), strict=True)]
        if all(text.finished for text in texts):
            return
    yield [text.finish() for text in texts]
