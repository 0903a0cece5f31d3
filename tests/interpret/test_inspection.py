"""Figures of trained depth mixers: shapes and values, and pictures of them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldm_jax.config import Config, ModelConfig
from ldm_jax.data import Batch
from ldm_jax.errors import UserError
from ldm_jax.infer import make_memory_figures
from ldm_jax.interpret.figures import inspect, reader_names, save_figures, source_names
from ldm_jax.interpret.plots import plot_inspection
from ldm_jax.mixers import AttnResBlockConfig, LDMConfig, MixerConfig, MixerKind, Write
from ldm_jax.nn import init_params, model_graph

MODEL = ModelConfig(depth=1, width=16, heads=2, mlp_width=16)
LDM = LDMConfig(groups=2, key_dim=3, latent_dim=5)
WINDOWS = Batch(np.random.default_rng(0).integers(0, 256, (3, 9), np.int32), None)


@pytest.fixture(scope="module")
def ldm():
    """Config, parameters and figures, computed in batches of two windows and one."""
    config = Config(model=MODEL, mixer=MixerConfig(ldm=LDM))
    params = init_params(MODEL, config.mixer, 0)
    return config, params, inspect(config, params, WINDOWS, 2)


def test_ldm(ldm, tmp_path):
    config, _, figures = ldm
    readers = sources = MODEL.sublayers + 1
    shapes = {name: values.shape for name, values in figures.items()}
    assert shapes == {
        "contribution": (readers, sources, 2), "absolute_contribution": (readers, sources, 2), "gate": (readers, 2),
        "gain": (readers, 2), "log10_condition": (readers, 2), "stream_rms": (readers,), "importance": (sources, 2),
        "forgetting": (sources, 2), "residual": (sources, 2),
    }  # fmt: skip
    assert (np.abs(figures["contribution"]) <= figures["absolute_contribution"] + 1e-7).all()
    for reader in range(readers):
        assert (figures["absolute_contribution"][reader, : reader + 1] > 0).all()
        assert (figures["absolute_contribution"][reader, reader + 1 :] == 0).all()
    np.testing.assert_allclose(figures["gain"], 2.0)
    np.testing.assert_allclose(figures["gate"], 0.5)
    np.testing.assert_allclose(figures["importance"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(figures["forgetting"][0], 1.0)
    assert ((figures["forgetting"][1:] > 0.9) & (figures["forgetting"][1:] < 1)).all()
    assert (figures["log10_condition"] >= 0).all()
    file = save_figures(config, figures, tmp_path / "new")
    np.testing.assert_allclose(json.loads(file.read_text())["residual"], figures["residual"])
    pictures = plot_inspection(config, figures, tmp_path, "a model")
    assert [picture.name for picture in pictures] == ["contributions.png", "contributions_by_group.png", "memory.png"]
    assert all(picture.stat().st_size > 10_000 for picture in pictures)
    assert reader_names(config) == ["attention 1", "MLP 1", "end"]
    assert source_names(config) == ["embedding", "attention 1", "MLP 1"]


def test_the_residual_is_that_of_the_final_memory(ldm):
    # |v - M k| / |v| of every observation, with M itself from a plain forward pass in the recurrent form over all
    # windows at once: every window has the same weight, whatever the size of its batch.
    config, params, figures = ldm
    model = nnx.merge(model_graph(MODEL, config.mixer), params)
    embedding = model.embedding(jnp.asarray(WINDOWS.tokens[:, :-1]))
    state = model.mixer.start(embedding)
    observations = [model.mixer.writer(embedding, jnp.ones(2))]
    block = jax.tree.map(lambda leaf: leaf[0], model.blocks)
    for sublayer in (block.attention, block.mlp):
        x, state = sublayer.mixer.read(state)
        output = sublayer.function(sublayer.norm(x))
        observations.append(sublayer.mixer.memory.writer(output, sublayer.mixer.memory.forgetting()))
        state, _ = sublayer.mixer.write(state, output)
    for observation, residual in zip(observations, figures["residual"], strict=True):
        error = observation.value - np.einsum("btgkv,btgk->btgv", state.memory.memory, observation.key)
        share = np.sum(error**2, axis=-1) / np.sum(observation.value**2, axis=-1)
        np.testing.assert_allclose(residual, np.sqrt(share.mean(axis=(0, 1))), rtol=1e-3)


def test_figures_of_the_training_log_agree():
    model = ModelConfig(depth=2, width=16, heads=2, mlp_width=16)
    config = Config(model=model, mixer=MixerConfig(ldm=LDMConfig(groups=2, key_dim=3, latent_dim=5)))
    params = init_params(model, config.mixer, 0)
    windows = np.random.default_rng(0).integers(256, size=(2, 9)).astype(np.int32)
    segments = np.array([[1] * 9, [1] * 4 + [2] * 5], np.int32)  # one window of two documents
    expected = inspect(config, params, Batch(windows, segments), 2)
    memory_figures = make_memory_figures(config)
    separate = memory_figures(params, Batch(windows[:, :-1], segments[:, :-1]))
    for name in ("gain", "gate", "log10_condition"):  # of sublayers; the last reader is the end
        np.testing.assert_allclose(getattr(separate, name), expected[name][:-1], rtol=1e-3, atol=1e-4)
    for name in ("forgetting", "importance"):  # of sublayers; the first source is the embedding
        np.testing.assert_allclose(getattr(separate, name), expected[name][1:], rtol=1e-3)
    together = Batch(windows[:, :-1], None)
    assert np.abs(memory_figures(params, together).log10_condition - separate.log10_condition).max() > 1e-4
    ruined = jax.tree.map(lambda leaf: leaf * np.nan, params)
    assert np.isnan(memory_figures(ruined, together).log10_condition).all()


@pytest.mark.parametrize("kind", ["attnres", "attnres_block"])
def test_attnres(tmp_path, kind):
    config = Config(model=MODEL, mixer=MixerConfig(kind=MixerKind(kind), attnres_block=AttnResBlockConfig(2)))
    figures = inspect(config, init_params(MODEL, config.mixer, 0), WINDOWS, 3)
    weights = figures["contribution"][..., 0]
    assert weights.shape == (3, 3)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    if kind == "attnres_block":  # the embedding alone; with a partial sum; with the finished sum of a block
        np.testing.assert_allclose(weights, [[1, 0, 0], [0.5, 0, 0.5], [0.5, 0.5, 0]], rtol=1e-6)
        assert source_names(config) == ["embedding", "block 1", "partial sum"]
    assert [picture.name for picture in plot_inspection(config, figures, tmp_path, "a model")] == ["contributions.png"]


def test_mixers_without_weights_are_rejected():
    for mixer, named in (
        (MixerConfig(kind=MixerKind.PRELN), "preln"),
        (MixerConfig(ldm=dataclasses.replace(LDM, write=Write.DELTA)), "write delta"),
    ):
        with pytest.raises(UserError, match=named):
            inspect(Config(model=MODEL, mixer=mixer), {}, WINDOWS, 3)
