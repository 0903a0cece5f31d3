"""Losses on held-out text: means and standard errors over windows."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldm_jax.config import DataConfig, ModelConfig
from ldm_jax.data import Batch, ByteTokenizer, ValidationWindows, load_validation_text
from ldm_jax.data.preparation import PrepareOptions, prepare
from ldm_jax.infer import make_evaluate
from ldm_jax.mixers import LDMConfig, MixerConfig, without_reads
from ldm_jax.nn import init_params, model_graph

MODEL = ModelConfig(depth=1, width=16, heads=2, mlp_width=16)
MIXER = MixerConfig(ldm=LDMConfig(groups=2, key_dim=2, latent_dim=4))
GRAPH = model_graph(MODEL, MIXER)


@pytest.fixture(scope="module")
def params():
    return init_params(MODEL, MIXER, 0)


evaluate = make_evaluate(GRAPH, batch_size=2, bytes_per_token=2.0, end_of_document=0)


@jax.jit
def log_probabilities(params, tokens):
    return jax.nn.log_softmax(nnx.merge(GRAPH, params)(tokens))


def token_losses(params, tokens):
    logs = np.concatenate([log_probabilities(params, window[None, :-1]) for window in tokens]).astype(np.float64)
    return -np.take_along_axis(logs, tokens[:, 1:, None], axis=-1).squeeze(-1)


def window_losses(params, tokens):
    return token_losses(params, tokens).mean(axis=1)


def windows_of(tokens, weights=None):
    return ValidationWindows(Batch(tokens, None), np.ones(len(tokens)) if weights is None else weights)


def test_windows_are_weighted(rng, params):
    tokens, weights = rng.integers(0, 256, (3, 9), np.int32), np.array([0.5, 0.5, 2.0])
    found = evaluate(params, windows_of(tokens, weights))
    losses = window_losses(params, tokens)
    mean = np.sum(weights * losses) / 3
    assert found.loss == pytest.approx(mean, rel=1e-5)
    error = math.sqrt(np.sum((weights * (losses - mean)) ** 2) * 3 / 2) / 3
    assert found.standard_error == pytest.approx(error, rel=1e-3)


def test_means_and_standard_errors_over_windows(rng, params):
    tokens = rng.integers(0, 256, (5, 9), np.int32)  # batches of two, so the last one is padded
    tokens[:, 4] = 0  # the end of a document
    with_reads, silent = (evaluate(each, windows_of(tokens)) for each in (params, without_reads(params)))
    expected, expected_silent = window_losses(params, tokens), window_losses(without_reads(params), tokens)
    assert with_reads.loss == pytest.approx(expected.mean(), rel=1e-5)
    assert with_reads.standard_error == pytest.approx(expected.std(ddof=1) / math.sqrt(5), rel=1e-3)
    text = token_losses(params, tokens)[tokens[:, 1:] != 0]
    assert with_reads.bits_per_byte == pytest.approx(text.mean() / math.log(2) / 2, rel=1e-5)
    difference, error = silent.difference(with_reads)
    paired = expected_silent - expected
    assert difference == pytest.approx(paired.mean(), abs=1e-5)
    assert error == pytest.approx(paired.std(ddof=1) / math.sqrt(5), abs=1e-5)
    assert error < with_reads.standard_error / 2  # variation between windows cancels


def test_the_same_text_has_the_same_bits_per_byte_however_it_is_read(tmp_path, params):
    for index in range(8):
        (tmp_path / f"{index}.txt").write_text(f"document {index} " * (index + 2))
    pattern = str(tmp_path / "*.txt")
    prepare(PrepareOptions((pattern,), validation_fraction=1.0), tmp_path / "corpus")
    uniform = jax.tree.map(jnp.zeros_like, params)
    for path, options in ((pattern, {}), (pattern, {"corpora": ("x",)}), (str(tmp_path / "corpus"), {})):
        text = load_validation_text(path, DataConfig(context=8, **options), ByteTokenizer())
        windows = text.validation_windows(1000)
        assert (windows.windows.tokens == 0).any()
        assert text.bytes_per_token == 1
        assert 2 * evaluate(uniform, windows).bits_per_byte == pytest.approx(8, rel=1e-6)


def test_one_window_has_no_standard_error(rng, params):
    assert math.isinf(evaluate(params, windows_of(rng.integers(0, 256, (1, 9), np.int32))).standard_error)
