"""What a depth mixer does: figures with the right shapes and values, and pictures of them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ldm_jax.mixers.memory_form import Recurrent

from ldm_jax.config import Config, ModelConfig
from ldm_jax.data import Batch
from ldm_jax.errors import UserError
from ldm_jax.interpret import figures as inspection
from ldm_jax.interpret.figures import inspect, reader_names, source_names, write_figures
from ldm_jax.interpret.plots import plot_inspection
from ldm_jax.mixers import AttnResBlockConfig, LDMConfig, MixerConfig, MixerKind, Write
from ldm_jax.nn import init_params

MODEL = ModelConfig(depth=1, width=16, heads=2, mlp_width=16)
LDM = LDMConfig(groups=2, key_dim=3, latent_dim=5)
WINDOWS = Batch(np.asarray(jax.random.randint(jax.random.key(0), (3, 9), 0, 256)), None)


def figures_of(mixer):
    config = Config(model=MODEL, mixer=mixer)
    return config, inspect(config, init_params(MODEL, mixer, 0), WINDOWS, 2)


def test_of_a_depth_memory(tmp_path):
    config, figures = figures_of(MixerConfig(ldm=LDM))
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
    # Every window counts, in however many batches: three windows, two at a time, and all at once.
    at_once = inspect(config, init_params(MODEL, config.mixer, 0), WINDOWS, 3)
    for name, values in at_once.items():
        np.testing.assert_allclose(figures[name], values, rtol=1e-4, atol=1e-5)
    file = write_figures(config, figures, tmp_path / "new")
    np.testing.assert_allclose(json.loads(file.read_text())["residual"], figures["residual"])
    pictures = plot_inspection(config, figures, tmp_path, "a model")
    assert [picture.name for picture in pictures] == ["contributions.png", "contributions_by_group.png", "memory.png"]
    assert all(picture.stat().st_size > 10_000 for picture in pictures)
    assert reader_names(config) == ["attention 1", "MLP 1", "end"]
    assert source_names(config) == ["embedding", "attention 1", "MLP 1"]


def test_the_residual_is_that_of_the_final_memory(monkeypatch):
    # With M itself, from the recurrent form: |v - M k|^2 / |v|^2 over tokens, for every observation.
    seen = {}

    def of_observations(write, width, memory):
        seen["memory"] = memory
        return kept(write, width, memory)

    kept = inspection._of_observations
    monkeypatch.setattr(inspection, "_of_observations", of_observations)
    monkeypatch.setattr(jax, "jit", lambda function: function)
    mixer = MixerConfig(ldm=LDM)
    figures = inspect(Config(model=MODEL, mixer=mixer), init_params(MODEL, mixer, 0), WINDOWS, 3)
    form, entries = Recurrent(Write.RLS), seen["memory"].observations.entries
    state = form.start(entries[0].importance.shape[:-1], 2, 8, 3, LDM.alpha)
    for entry in entries:
        forgetting = jnp.broadcast_to(entry.forgetting, entry.importance.shape)
        state, _ = form.write(state, entry._replace(forgetting=forgetting))
    m = np.asarray(state.memory)
    for entry, residual in zip(entries, figures["residual"], strict=True):
        error = np.asarray(entry.value) - np.einsum("btgkv,btgk->btgv", m, entry.key)
        share = np.sum(error**2, axis=-1) / np.sum(np.square(entry.value), axis=-1)
        np.testing.assert_allclose(residual, np.sqrt(share.mean(axis=(0, 1))), rtol=1e-3)


@pytest.mark.parametrize("kind", ["attnres", "attnres_block"])
def test_of_attention_residuals(tmp_path, kind):
    config, figures = figures_of(MixerConfig(kind=MixerKind(kind), attnres_block=AttnResBlockConfig(2)))
    weights = figures["contribution"][..., 0]
    assert weights.shape == (3, 3)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    if kind == "attnres_block":  # alone; beside a sum that has begun; beside a finished one
        np.testing.assert_allclose(weights, [[1, 0, 0], [0.5, 0, 0.5], [0.5, 0.5, 0]], rtol=1e-6)
        assert source_names(config) == ["embedding", "block 1", "partial sum"]
    assert [picture.name for picture in plot_inspection(config, figures, tmp_path, "a model")] == ["contributions.png"]


def test_what_has_no_weights_is_refused():
    for mixer, words in (
        (MixerConfig(kind=MixerKind.PRELN), "the mixer preln has no weights"),
        (MixerConfig(ldm=dataclasses.replace(LDM, write=Write.DELTA)), "the write delta has no weights"),
    ):
        with pytest.raises(UserError, match=words):
            figures_of(mixer)
