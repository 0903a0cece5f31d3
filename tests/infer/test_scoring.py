"""Log-likelihoods of continuations, and the loss on a text of any length."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.config import Config, DataConfig, ModelConfig
from ldm_jax.data import ByteTokenizer
from ldm_jax.errors import UserError
from ldm_jax.infer import Model, evaluate_text
from ldm_jax.infer.scoring import cut_windows, score_continuations
from ldm_jax.mixers import MixerConfig
from ldm_jax.nn import init_params, model_graph

CONTEXT = 48
CONFIG = Config(
    ModelConfig(depth=1, width=16, heads=2, mlp_width=16, loss_chunk=40),
    MixerConfig(kind="preln"),
    DataConfig(context=CONTEXT),
)


def make_model():
    params = jax.tree.map(lambda x: 2 * x, init_params(CONFIG.model, CONFIG.mixer, 0))  # far from uniform
    graph = model_graph(CONFIG.model, CONFIG.mixer)
    return Model(Path("run"), CONFIG, graph, params, ByteTokenizer(), 1, False, "")


def make_uniform(model):
    return dataclasses.replace(model, params=jax.tree.map(jnp.zeros_like, model.params))


@pytest.fixture(scope="module")
def model():
    return make_model()


def by_hand(model, before, tokens):
    """Token by token, from the logits after the last T tokens that `cut_windows` leaves."""
    total, greedy = 0.0, True
    for window in cut_windows(before, tokens, CONTEXT):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(window.tokens) - 1] = window.tokens[:-1]
        logits = np.asarray(model.logits(jnp.asarray(padded))[0], np.float64)
        for place in range(len(window.tokens) - 1 - window.scored, len(window.tokens) - 1):
            target = window.tokens[place + 1]
            total += logits[place, target] - np.log(np.sum(np.exp(logits[place] - logits[place].max())))
            total -= logits[place].max()
            greedy &= bool(logits[place].argmax() == target)
    return total, greedy


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
    for length in (1, 15, 300):
        found = evaluate_text(make_uniform(model), ["é" * length, "abc"], 4)
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
