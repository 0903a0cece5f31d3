"""Decoding with a cache gives the logits of the whole, for every mixer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldm_jax.config import ModelConfig
from ldm_jax.mixers import AttnResBlockConfig, Form, HyperConfig, LDMConfig, MixerConfig, MixerKind, Write
from ldm_jax.nn import model_graph
from ldm_jax.nn.attention import make_documents
from ldm_jax.nn.cache import init_cache, next_places
from models import moved_params

MODEL = ModelConfig(depth=2, width=16, heads=4, kv_heads=2, mlp_width=24, vocabulary=11)
LDM = LDMConfig(groups=2, key_dim=3, latent_dim=5)
MIXERS = {
    "preln": MixerConfig(MixerKind.PRELN),
    "ldm": MixerConfig(ldm=LDM),
    "ldm_delta": MixerConfig(ldm=dataclasses.replace(LDM, write=Write.DELTA)),
    "ldm_dual": MixerConfig(ldm=dataclasses.replace(LDM, form=Form.DUAL)),
    "attnres": MixerConfig(MixerKind.ATTNRES),
    "attnres_block": MixerConfig(MixerKind.ATTNRES_BLOCK, attnres_block=AttnResBlockConfig(block_size=2)),
    "hc": MixerConfig(MixerKind.HC, hc=HyperConfig(streams=2)),
    "mhc": MixerConfig(MixerKind.MHC),
    "denseformer": MixerConfig(MixerKind.DENSEFORMER),
}
IDS = jax.random.randint(jax.random.key(5), (2, 12), 0, MODEL.vocabulary, jnp.int32)


@functools.cache
def decoder(config, mixer):
    graph = model_graph(config, mixer)

    def decode(params, tokens, cache):
        model = nnx.merge(graph, params)
        hidden, cache = model.decode(tokens, cache)
        return model.logits(hidden), cache

    return jax.jit(decode)


def decoded(config, mixer, params, ids, window, pieces, start=None):
    """Logits of all tokens, decoded in pieces of these lengths."""
    start = jnp.zeros(ids.shape[0], jnp.int32) if start is None else start
    cache, found, place = init_cache(config, start, window), [], 0
    for count in pieces:
        logits, cache = decoder(config, mixer)(params, ids[:, place : place + count], cache)
        found.append(logits)
        place += count
    return jnp.concatenate(found, axis=1)


def full(config, mixer, params, ids, segments=None):
    graph = model_graph(config, mixer)

    def logits(params, ids):
        model = nnx.merge(graph, params)
        return model.logits(model.hidden(ids, segments))

    return jax.jit(logits)(params, ids)


@pytest.mark.parametrize("name", MIXERS)
def test_cached_logits_are_those_of_the_whole(name):
    # Sequences of all lengths from 1 on, which end together, in chunks of four and then a token at a time.
    mixer, last = MIXERS[name], 10
    params = moved_params(MODEL, mixer)
    ids = jax.random.randint(jax.random.key(5), (last, last), 0, MODEL.vocabulary, jnp.int32)
    start = jnp.arange(last)
    found = decoded(MODEL, mixer, params, ids, last, [4, 4, 1, 1], start)
    from_zero = jnp.stack([jnp.roll(row, -place) for place, row in enumerate(ids)])  # what follows is not seen
    expected = full(MODEL, mixer, params, from_zero)
    for place in range(last):
        np.testing.assert_allclose(found[place, place:], expected[place, : last - place], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ldm_dual", "attnres"])
def test_unrolled(name):
    mixer, config = MIXERS[name], dataclasses.replace(MODEL, scan=False)
    params = moved_params(config, mixer)
    expected = full(config, mixer, params, IDS)
    np.testing.assert_allclose(decoded(config, mixer, params, IDS, 12, [9, 1, 1, 1]), expected, rtol=1e-4, atol=1e-5)


def test_past_the_window_the_oldest_places_are_used_again():
    # Of one block: a token sees the last four places, as if it stood at the end of four tokens.
    config, mixer = dataclasses.replace(MODEL, depth=1), MIXERS["preln"]
    params = moved_params(config, mixer)
    found = decoded(config, mixer, params, IDS, 4, [1] * 12)
    for place in (3, 7, 11):
        window = full(config, mixer, params, IDS[:, place - 3 : place + 1])
        np.testing.assert_allclose(found[:, place], window[:, -1], rtol=1e-4, atol=1e-5)


def test_places():
    cache = init_cache(MODEL, jnp.asarray([0, 3]), 4)._replace(length=jnp.asarray(5))
    columns, positions, visible = next_places(cache, 1)
    assert columns.tolist() == [1]
    assert positions.tolist() == [[5], [2]]
    assert visible[:, 0].tolist() == [[True] * 4, [True, True, False, True]]  # columns hold places 4, 5, 2, 3


@pytest.mark.parametrize("name", ["ldm", "attnres"])
def test_documents_do_not_see_each_other(name):
    # Two documents in one window are as each of them alone.
    mixer = MIXERS[name]
    params = moved_params(MODEL, mixer)
    segments = jnp.asarray([[1] * 5 + [2] * 7] * 2)
    packed = full(MODEL, mixer, params, IDS, segments)
    np.testing.assert_allclose(packed[:, :5], full(MODEL, mixer, params, IDS[:, :5]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(packed[:, 5:], full(MODEL, mixer, params, IDS[:, 5:]), rtol=1e-4, atol=1e-5)


def test_positions_in_documents():
    documents = make_documents(jnp.asarray([[3, 3, 4, 4, 4, 5], [1, 1, 1, 1, 1, 1]]))
    assert documents.positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
