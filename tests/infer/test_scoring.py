"""Log-likelihoods of continuations, and the loss on a text of any length."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.data import ByteTokenizer
from ldm_jax.errors import UserError
from ldm_jax.infer import Sampling, evaluate_text
from ldm_jax.infer.scoring import cut_windows, score_continuations
from scored_model import CONTEXT, by_hand, make_model


@pytest.fixture(scope="module")
def model():
    return make_model()


def test_windows_score_each_token_once_with_as_much_context_as_there_is():
    def windows(before, tokens):
        return [(window.tokens.tolist(), window.scored) for window in cut_windows(before, tokens, 4)]

    assert windows([0], range(1, 11)) == [([0, 1, 2, 3, 4], 4), ([4, 5, 6, 7, 8], 4), ([6, 7, 8, 9, 10], 2)]
    assert windows([1, 2, 3], [4]) == [([1, 2, 3, 4], 1)]
    assert windows([1, 2, 3, 4], [5]) == [([1, 2, 3, 4, 5], 1)]  # a context of four tokens
    assert windows([1, 2, 3, 4, 5], [6]) == [([2, 3, 4, 5, 6], 1)]  # and one more
    assert windows([1, 2], [3, 4, 5, 6, 7]) == [([1, 2, 3, 4, 5, 6][1:], 4), ([3, 4, 5, 6, 7], 1)]
    assert windows([1], []) == []


def test_continuations_of_any_length_score_as_by_hand_at_any_batch_size(model, rng):
    tokens = rng.integers(1, 256, 200).tolist()
    shapes = (1, 3), (5, 1), (CONTEXT, 1), (CONTEXT + 1, 1), (CONTEXT - 1, 2), (70, 20), (2, 100), (9, 0), (40, 8)
    pairs = [(tokens[:before], tokens[before : before + count]) for before, count in shapes]
    likeliest = int(np.argmax(model.logits(jnp.asarray([tokens[:CONTEXT]]))[0, -1]))
    pairs.append((tokens[:CONTEXT], [likeliest]))
    found = score_continuations(model, pairs, 4)
    for pair, (log_likelihood, greedy) in zip(pairs, found, strict=True):
        expected, expected_greedy = by_hand(model, *pair)
        assert log_likelihood == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert greedy == expected_greedy
    assert found[-1][1]
    assert not found[0][1]
    alone = score_continuations(model, pairs, 1)
    assert [greedy for _, greedy in alone] == [greedy for _, greedy in found]
    np.testing.assert_allclose([each for each, _ in alone], [each for each, _ in found], rtol=1e-6, atol=1e-6)


def test_a_uniform_model_has_eight_bits_per_byte(model):
    uniform = dataclasses.replace(model, params=jax.tree.map(jnp.zeros_like, model.params))
    for length in (1, 15, 300):
        found = evaluate_text(uniform, ["é" * length, "abc"], 4)
        assert found.bits_per_byte == pytest.approx(8, rel=1e-6)
        assert found.loss == pytest.approx(math.log(256), rel=1e-6)
        assert found.windows[1].sum() == 2 * length + 3
        assert found.standard_error < 1e-5


def test_a_text_counts_whole(model, rng):
    text = "".join(map(chr, rng.integers(32, 127, 130)))
    found = evaluate_text(model, [text, text[:10]], 4)
    expected = -sum(by_hand(model, [0], part.encode())[0] for part in (text, text[:10]))
    assert found.loss == pytest.approx(expected / 140, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(expected / 140 / math.log(2), rel=1e-5)
    assert 0 < found.standard_error < found.loss
    with pytest.raises(UserError, match="empty"):
        evaluate_text(model, [""], 4)


def test_the_tokenizers_start_precedes_a_text_until_the_model_is_trained(model):
    class Tokenizer(ByteTokenizer):
        start = (7,)

    imported = dataclasses.replace(model, tokenizer=Tokenizer())
    assert evaluate_text(imported, ["abc"], 1).loss == pytest.approx(-by_hand(model, [7], b"abc")[0] / 3, rel=1e-5)
    trained = dataclasses.replace(imported, corpus="books")
    assert evaluate_text(trained, ["abc"], 1).loss == pytest.approx(-by_hand(model, [0], b"abc")[0] / 3, rel=1e-5)
    greedy = Sampling(temperature=0.0)
    (text,) = imported.generate(["b"], 1, sampling=greedy)
    likeliest = int(np.argmax(model.logits(np.array([[7, 98]]))[0, -1]))
    assert text == bytes([likeliest]).decode(errors="replace")


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        ([[1, 256]], r"256.*\[0, 256\)"),
        ([[1, -1]], "-1"),
        (np.zeros((0, 2), np.int32), r"shape \(0, 2\)"),
        ([[1]], r"shape \(1, 1\)"),
    ],
)
def test_tokens_that_have_no_loss_are_refused(model, tokens, match):
    with pytest.raises(ValueError, match=match):
        model.loss(np.asarray(tokens))


def test_scores_that_are_not_numbers_are_refused(model):
    broken = dataclasses.replace(model, params=jax.tree.map(lambda leaf: leaf * np.nan, model.params))
    with pytest.raises(UserError, match="NaN"):
        score_continuations(broken, [([1], [2])], 4)
