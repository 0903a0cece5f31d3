"""Generated tokens equal those of the full forward pass, whatever else is in the batch; texts and stop strings."""

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
GREEDY = Sampling(temperature=0.0, repetition_penalty=1.5)  # the penalty avoids repeating a single token
PROMPTS = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


def take(count, prompts=PROMPTS, context=16, **options):
    tokens = itertools.islice(generate(GRAPH, PARAMS, prompts, context, **options), count)
    return np.stack(list(tokens), axis=1).tolist()


def test_greedy_tokens_are_those_of_the_full_forward_pass():
    model = jax.jit(lambda ids: nnx.merge(GRAPH, PARAMS)(ids))
    for prompt, found in zip(PROMPTS, take(6, sampling=GREEDY), strict=True):
        ids = list(prompt)
        for token in found:
            padded = jnp.asarray([ids + [0] * (16 - len(ids))])  # attention is causal
            logits = np.asarray(model(padded))[0, len(ids) - 1]
            penalised = np.where(np.isin(np.arange(256), ids), np.where(logits > 0, logits / 1.5, logits * 1.5), logits)
            assert token == int(np.argmax(penalised))
            ids.append(token)


def test_draws_depend_on_the_seed_and_the_row_alone():
    sampling = Sampling(temperature=1.0)
    together = take(5, sampling=sampling)
    assert take(5, sampling=sampling) == together
    assert take(5, PROMPTS[:1], sampling=sampling) == together[:1]
    assert take(5, sampling=sampling, seed=1) != together
    rows = take(5, [PROMPTS[1]] * 3, sampling=sampling)
    assert rows[0] != rows[1]


@pytest.mark.parametrize("chunk", [3, 5, 100])
def test_prompts_in_chunks(chunk):
    # Only the last `context` tokens of a longer prompt are read; chunks of 3 do not divide them.
    long = [list(range(1, 20)), [3]]
    expected = read_prompts(GRAPH, PARAMS, [long[0][-10:], [3]], 10, chunk=10)
    found = read_prompts(GRAPH, PARAMS, long, 10, chunk=chunk)
    np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_ids_without_a_token_are_not_drawn():
    drawn = take(20, ids=[7, 200, 300], sampling=Sampling(temperature=1.0))
    assert {token for row in drawn for token in row} == {7, 200}


def test_generation_continues_past_the_context():
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
def test_invalid_arguments_are_refused(prompts, options, match):
    with pytest.raises(ValueError, match=match):
        generate(GRAPH, PARAMS, prompts, **{"context": 8} | options)


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


def test_missing_prompts_and_empty_stop_strings_are_refused():
    with pytest.raises(ValueError, match="no prompt"):
        complete(GRAPH, PARAMS, ByteTokenizer(), [], 32, 3)
    with pytest.raises(ValueError, match="stop string"):
        complete(GRAPH, PARAMS, ByteTokenizer(), ["a"], 32, 3, stop=[""])


def test_texts_of_several_prompts():
    pieces = list(complete(GRAPH, PARAMS, ByteTokenizer(), ["def ", "", "x = 1"], 16, 7, sampling=GREEDY))
    texts = [b"".join(parts) for parts in zip(*pieces, strict=True)]
    ids = take(7, [list(b"def "), [0], list(b"x = 1")], sampling=GREEDY)
    expected = [bytes(row).split(b"\0")[0] for row in ids]
    assert texts == expected
    with pytest.raises(ValueError, match="tokens is 0"):
        complete(GRAPH, PARAMS, ByteTokenizer(), ["a"], 16, 0)
