"""Text from a model: prompts and their continuations, streamed."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from ldm_jax.data import Tokenizer
from ldm_jax.errors import UserError
from ldm_jax.infer.generation import Graph, generate
from ldm_jax.infer.sampling import Sampling

CONTEXT = 16
"""Number of prompt tokens that a continuation is decoded with."""
SMALLEST_CACHE = 128
"""Number of tokens in the smallest cache, unless the context is smaller."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


class Completion:
    """The text after a prompt, decoded token by token.

    It ends before the first stop string, or where the model ends the document.
    """

    text: bytes
    """The text so far, without a trailing part that may be the start of a stop string or of a character."""
    finished: bool

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[bytes] = (), prompt: Sequence[int] = ()):
        self._tokenizer, self._stop = tokenizer, [word for word in stop if word]
        # Some tokenizers drop a space before the first token, so decoding starts with tokens of the prompt.
        self._tokens = list(prompt[-CONTEXT:])
        self._prompt_length = len(tokenizer.decode(self._tokens))
        self.text = b""
        self.finished = False

    def add(self, token: int) -> bytes:
        """Appends a token; returns the bytes added to `text`. Does nothing once finished."""
        if self.finished:
            return b""
        if token == self._tokenizer.end_of_document:
            return self.finish()
        self._tokens.append(token)
        decoded = self._decode()
        stops = [index for word in self._stop if (index := decoded.find(word)) >= 0]
        self.finished = bool(stops)
        return self._extend(decoded, min(stops) if stops else len(decoded) - self._incomplete(decoded))

    def finish(self) -> bytes:
        """Ends the text; returns the bytes that were held back."""
        if self.finished:
            return b""
        self.finished = True
        decoded = self._decode()
        return self._extend(decoded, len(decoded))

    def _decode(self) -> bytes:
        return self._tokenizer.decode(self._tokens)[self._prompt_length :]

    def _extend(self, decoded: bytes, end: int) -> bytes:
        new = decoded[len(self.text) : end]
        self.text += new
        return new

    def _incomplete(self, decoded: bytes) -> int:
        """Length of the longest suffix that may be the start of a stop string or of a character."""
        starts = [word[:length] for word in self._stop for length in range(1, len(word))]
        # Some tokenizers decode each byte of an incomplete character to one replacement character.
        starts += [REPLACEMENT * count for count in range(1, 4)]
        return max((len(start) for start in starts if decoded.endswith(start)), default=0)


def read_prompt(file: Path) -> str:
    """The content of a text file, or of standard input for `-`, without one newline at its end.

    Editors and `echo` write that newline, and a model continues a text that has it differently.

    Raises:
        UserError: the file cannot be read, or it is not UTF-8.
    """
    standard_input = str(file) == "-"
    name = "standard input" if standard_input else file
    if standard_input and sys.stdin is None:
        raise UserError("standard input is closed: give a prompt or a file.")
    if standard_input and sys.stdin.isatty():
        print("type the prompt; end it with Enter and Ctrl-D.", file=sys.stderr)
    try:
        content = sys.stdin.buffer.read() if standard_input else file.read_bytes()
        text = content.decode("utf-8-sig")  # read_text would convert line ends
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start:,}): convert it.") from error
    return re.sub(r"\r?\n\Z", "", text)


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
    start: Sequence[int] = (),
) -> Iterator[list[bytes]]:
    """Generates at most `count` tokens after every prompt; yields the new bytes of every text, once per token.

    The tokens `start` precede every prompt. Only ids that have a token are drawn. The concatenated pieces of a prompt
    are its text. An empty prompt is the start of a document. The iterator ends early when every text has reached a stop
    string, which is left out, or the end of its document. A token attends to itself and to the `context - 1` tokens
    before it. Where the texts are shorter, so is the cache: its size is a power of two, so that few sizes are compiled.

    Raises:
        UserError: the tokenizer cannot encode a prompt.
        ValueError: `count` is below 1, there is no prompt, or a stop string is empty; otherwise as for `generate`.
    """
    if count < 1:
        raise ValueError(f"the number of tokens is {count}, but it must be at least 1.")
    if isinstance(prompts, str):
        raise ValueError("the prompts are one text, but must be a sequence of texts: give [text].")
    if not prompts:
        raise ValueError("there is no prompt: give at least one.")
    if "" in stop:
        raise ValueError("a stop string is empty: give at least one character.")
    ids = [[*start, *tokenizer.encode(prompt).tolist()] or [tokenizer.end_of_document] for prompt in prompts]
    words = [word.encode(errors="surrogateescape") for word in stop]
    texts = [Completion(tokenizer, words, prompt) for prompt in ids]
    needed = max(len(prompt) for prompt in ids) + count
    window = min(context, max(SMALLEST_CACHE, 1 << (needed - 1).bit_length()))
    tokens = generate(graph, params, ids, window, ids=tokenizer.ids, sampling=sampling, seed=seed)
    return _stream(texts, tokens, count)


def _stream(texts: Sequence[Completion], tokens: Iterator[Int[np.ndarray, " B"]], count: int) -> Iterator[list[bytes]]:
    for _ in range(count):
        yield [text.add(int(token)) for text, token in zip(texts, next(tokens), strict=True)]
        if all(text.finished for text in texts):
            return
    yield [text.finish() for text in texts]
