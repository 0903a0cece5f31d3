"""Tokens and texts from a model: those that the whole forward pass would give, whatever stands beside them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldm_jax.config import ModelConfig
from ldm_jax.data.tokenizer import ByteTokenizer
from ldm_jax.infer import Completion, Sampling, complete, generate
from ldm_jax.infer.generation import read_prompts
from ldm_jax.mixers import LDMConfig, MixerConfig
from ldm_jax.nn import init_params, model_graph

MODEL = ModelConfig(depth=1, width=16, heads=2, mlp_width=16)
MIXER = MixerConfig(ldm=LDMConfig(groups=2, key_dim=2, latent_dim=4))
GRAPH, PARAMS = model_graph(MODEL, MIXER), init_params(MODEL, MIXER, 0)
GREEDY = Sampling(temperature=0.0, repetition_penalty=1.5)  # the penalty keeps it from a single token forever
PROMPTS = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


def take(count, prompts=PROMPTS, context=32, **options):
    tokens = itertools.islice(generate(GRAPH, PARAMS, prompts, context, **options), count)
    return np.stack(list(tokens), axis=1).tolist()


def test_greedy_tokens_are_those_of_the_whole_forward_pass():
    model = jax.jit(lambda ids: nnx.merge(GRAPH, PARAMS)(ids))
    for prompt, found in zip(PROMPTS, take(6, sampling=GREEDY, chunk=4), strict=True):
        ids = list(prompt)
        for token in found:
            padded = jnp.asarray([ids + [0] * (16 - len(ids))])  # attention is causal
            logits = np.asarray(model(padded))[0, len(ids) - 1]
            penalised = np.where(np.isin(np.arange(256), ids), np.where(logits > 0, logits / 1.5, logits * 1.5), logits)
            assert token == int(np.argmax(penalised))
            ids.append(token)


def test_draws_depend_on_the_seed_and_the_row_alone():
    sampling = Sampling(temperature=1.0)
    together = take(5, sampling=sampling, chunk=4)
    assert take(5, sampling=sampling, chunk=4) == together
    assert take(5, PROMPTS[:1], sampling=sampling, chunk=4) == together[:1]
    assert take(5, sampling=sampling, chunk=4, seed=1) != together
    assert take(5, [PROMPTS[1]] * 3, sampling=sampling, chunk=4)[0] != take(5, [PROMPTS[1]] * 3, sampling=sampling)[1]


@pytest.mark.parametrize("chunk", [3, 4, 5, 100])
def test_prompts_in_chunks(chunk):
    # The last `context` tokens of a longer prompt, in pieces that do not divide it.
    long = [list(range(1, 20)), [3]]
    expected = read_prompts(GRAPH, PARAMS, [long[0][-10:], [3]], 10, chunk=10)
    found = read_prompts(GRAPH, PARAMS, long, 10, chunk=chunk)
    np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_it_goes_on_past_the_window():
    assert len(take(40, [[1, 2]], context=8, sampling=GREEDY, chunk=4)[0]) == 40


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"),
    [
        ([], {}, "a prompt is empty"),
        ([[1], []], {}, "a prompt is empty"),
        ([[1, 256]], {}, "a prompt has the token 256, but the vocabulary ends at 255"),
        ([[1]], {"context": 0}, "context is 0"),
        ([[1]], {"chunk": 0}, "chunk 0"),
        ([[1]], {"seed": 2**32}, r"seed is 4294967296"),
    ],
)
def test_what_is_refused(prompts, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        generate(GRAPH, PARAMS, prompts, **{"context": 8} | options)


def grown(tokens, stop=()):
    text = Completion(ByteTokenizer(), [word.encode() for word in stop])
    return [text.add(token) for token in tokens] + [text.finish()], text.text


def test_a_stop_string_is_left_out_however_it_comes():
    pieces, text = grown(b"one two three", stop=["two", "three"])
    assert text == b"one "
    assert b"".join(pieces) == text
    assert pieces[:6] == [b"o", b"n", b"e", b" ", b"", b""]  # what may begin a stop string is held back
    assert grown(b"twice", stop=["two"])[1] == b"twice"
    assert grown(b"a tw", stop=["two"])[1] == b"a tw"  # and given when the text ends
    assert grown(b"ab\0cd")[1] == b"ab"  # the end of the document


class Spelled(ByteTokenizer):
    """A tokeniser that leaves out a first space, and shows a sign for a character that is not whole."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace").removeprefix(" ").encode()


def test_text_is_decoded_after_its_prompt_and_in_whole_characters():
    text = Completion(Spelled(), [b" world"], prompt=list(b"hello"))
    assert b"".join(text.add(token) for token in " €".encode()) == " €".encode()
    assert b"".join(text.add(token) for token in b" world") == b""
    assert (text.text, text.finished) == (" €".encode(), True)


def test_nothing_to_go_on_from_is_refused():
    with pytest.raises(ValueError, match="there is no prompt"):
        complete(GRAPH, PARAMS, ByteTokenizer(), [], 32, 3)
    with pytest.raises(ValueError, match="a stop string is empty"):
        complete(GRAPH, PARAMS, ByteTokenizer(), ["a"], 32, 3, stop=[""])


def test_texts_of_several_prompts():
    pieces = list(complete(GRAPH, PARAMS, ByteTokenizer(), ["def ", ""], 16, 7, sampling=GREEDY))
    texts = [b"".join(parts) for parts in zip(*pieces, strict=True)]
    ids = take(7, [list(b"def "), [0]], context=16, sampling=GREEDY)
    expected = [bytes(row).split(b"\0")[0] for row in ids]
    assert texts == expected
    with pytest.raises(ValueError, match="number of tokens is 0"):
        complete(GRAPH, PARAMS, ByteTokenizer(), ["a"], 16, 0)
