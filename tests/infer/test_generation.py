"""Generated tokens equal those of the full forward pass, whatever else is in the batch; texts and stop strings."""

import io
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldm_jax.config import ModelConfig
from ldm_jax.data.tokenizer import ByteTokenizer
from ldm_jax.errors import UserError
from ldm_jax.infer import Completion, Sampling, complete, generate, read_prompt
from ldm_jax.infer.generation import read_prompts, token_step
from ldm_jax.mixers import LDMConfig, MixerConfig
from ldm_jax.nn import init_params, model_graph

MODEL = ModelConfig(depth=1, width=16, heads=2, mlp_width=16)
MIXER = MixerConfig(ldm=LDMConfig(groups=2, key_dim=2, latent_dim=4))
GRAPH = model_graph(MODEL, MIXER)
GREEDY = Sampling(temperature=0.0, repetition_penalty=1.5)  # the penalty avoids repeating a single token
PROMPTS = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.fixture(scope="module")
def params():
    return init_params(MODEL, MIXER, 0)


@pytest.fixture
def take(params):
    """Generates this many tokens after each prompt."""

    def run(count, prompts=PROMPTS, context=16, **options):
        tokens = itertools.islice(generate(GRAPH, params, prompts, context, **options), count)
        return np.stack(list(tokens), axis=1).tolist()

    return run


@pytest.fixture
def texts(params):
    """The texts after prompts."""

    def run(prompts, context, count, **options):
        pieces = complete(GRAPH, params, ByteTokenizer(), prompts, context, count, **options)
        return [b"".join(parts) for parts in zip(*pieces, strict=True)]

    return run


def test_greedy_tokens_are_those_of_the_full_forward_pass(take, params):
    model = jax.jit(lambda ids: nnx.merge(GRAPH, params)(ids))
    for prompt, found in zip(PROMPTS, take(6, sampling=GREEDY), strict=True):
        ids = list(prompt)
        for token in found:
            padded = jnp.asarray([ids + [0] * (16 - len(ids))])  # attention is causal
            logits = np.asarray(model(padded))[0, len(ids) - 1]
            penalised = np.where(np.isin(np.arange(256), ids), np.where(logits > 0, logits / 1.5, logits * 1.5), logits)
            assert token == int(np.argmax(penalised))
            ids.append(token)


def test_draws_depend_on_the_seed_and_the_row_alone(take):
    sampling = Sampling(temperature=1.0)
    together = take(5, sampling=sampling)
    assert take(5, sampling=sampling) == together
    assert take(5, PROMPTS[:1], sampling=sampling) == together[:1]
    assert take(5, sampling=sampling, seed=1) != together
    rows = take(5, [PROMPTS[1]] * 3, sampling=sampling)
    assert rows[0] != rows[1]


@pytest.mark.parametrize("chunk", [3, 5, 100])
def test_prompts_in_chunks(chunk, params):
    # Only the last `context` tokens of a longer prompt are read; chunks of 3 do not divide them.
    long = [list(range(1, 20)), [3]]
    expected = read_prompts(GRAPH, params, [long[0][-10:], [3]], 10, chunk=10)
    found = read_prompts(GRAPH, params, long, 10, chunk=chunk)
    np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_ids_without_a_token_are_not_drawn(take):
    drawn = take(20, ids=[7, 200, 300], sampling=Sampling(temperature=1.0))
    assert {token for row in drawn for token in row} == {7, 200}


def test_logits_that_are_not_numbers_are_refused(params):
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, params)
    for sampling in (Sampling(), GREEDY):
        with pytest.raises(UserError, match="NaN"):
            next(generate(GRAPH, broken, PROMPTS, 16, sampling=sampling))


def test_generation_continues_past_the_context(take):
    assert [len(tokens) for tokens in take(40, sampling=GREEDY)] == [40, 40, 40]


@pytest.mark.parametrize(
    ("prompts", "options", "match"),
    [
        ([], {}, "prompt is empty"),
        ([[1], []], {}, "prompt is empty"),
        ([[1, 256]], {}, r"token 256.* 256\)"),
        ([[-1, 5]], {}, "token -1"),
        ([[1]], {"context": 0}, "context is 0"),
        ([[1]], {"chunk": 0}, "chunk is 0"),
        ([[1]], {"seed": 2**32}, "seed is 4294967296"),
        ([[1]], {"ids": [256]}, "ids has no token"),
    ],
)
def test_invalid_arguments_are_refused(params, prompts, options, match):
    with pytest.raises(ValueError, match=match):
        generate(GRAPH, params, prompts, **{"context": 8} | options)


def streamed(tokens, stop=()):
    text = Completion(ByteTokenizer(), [word.encode() for word in stop])
    return [text.add(token) for token in tokens] + [text.finish()], text.text


def test_a_stop_string_is_left_out():
    pieces, text = streamed(b"one two three", stop=["two", "three"])
    assert text == b"one "
    assert b"".join(pieces) == text
    assert pieces[:6] == [b"o", b"n", b"e", b" ", b"", b""]  # the possible start of a stop string is held back
    assert streamed(b"twice", stop=["two"])[1] == b"twice"
    assert streamed(b"a tw", stop=["two"])[1] == b"a tw"  # and released when the text ends
    assert streamed(b"ab\0cd")[1] == b"ab"  # the end of the document


class WordTokenizer(ByteTokenizer):
    """Drops a leading space, and decodes incomplete characters to replacement characters."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace").removeprefix(" ").encode()


def test_text_is_decoded_after_its_prompt_and_in_complete_characters():
    text = Completion(WordTokenizer(), [b" world"], prompt=list(b"hello"))
    assert b"".join(text.add(token) for token in " €".encode()) == " €".encode()
    assert b"".join(text.add(token) for token in b" world") == b""
    assert (text.text, text.finished) == (" €".encode(), True)


def test_missing_prompts_and_empty_stop_strings_are_refused(texts):
    with pytest.raises(ValueError, match="no prompt"):
        texts([], 32, 3)
    with pytest.raises(ValueError, match="stop string"):
        texts(["a"], 32, 3, stop=[""])
    with pytest.raises(ValueError, match="tokens is 0"):
        texts(["a"], 16, 0)


def test_texts_of_several_prompts(take, texts):
    prompts = ["def ", "", "x = 1"]
    ids = take(7, [list(b"def "), [0], list(b"x = 1")], sampling=GREEDY)
    expected = [bytes(row).split(b"\0")[0] for row in ids]
    assert texts(prompts, 16, 7, sampling=GREEDY) == expected
    # The cache has the size of the texts: this context would need petabytes.
    assert texts(prompts, 10**12, 7, sampling=GREEDY) == expected


def test_other_sampling_options_compile_nothing(take):
    step = token_step(GRAPH)
    take(2)
    programs = step._cache_size()
    drawn = [
        take(2, sampling=sampling)
        for sampling in (
            GREEDY,
            Sampling(temperature=1.5, top_p=0.9),
            Sampling(top_k=3, min_p=0.1, repetition_penalty=1.1),
            Sampling(temperature=1000.0),
        )
    ]
    assert step._cache_size() == programs
    assert drawn[0] != drawn[-1]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"def f(x):\r\n    return\n\n", "def f(x):\r\n    return\n"),
        (b"\xef\xbb\xbfone line\r\n", "one line"),
        ("without a newline, in Ελληνικά".encode(), "without a newline, in Ελληνικά"),
        (b"\n", ""),
        (b"", ""),
    ],
)
def test_prompt_files(tmp_path, monkeypatch, content, expected):
    file = tmp_path / "prompt.txt"
    file.write_bytes(content)
    assert read_prompt(file) == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert read_prompt(Path("-")) == expected


def test_prompt_files_that_cannot_be_read(tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    for path in (file, tmp_path):
        with pytest.raises(UserError, match=str(path)):
            read_prompt(path)
    for encoding in ("latin-1", "utf-16"):
        file.write_text("naïve", encoding=encoding)
        with pytest.raises(UserError, match=str(file)):
            read_prompt(file)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(UserError, match="standard input"):
        read_prompt(Path("-"))
