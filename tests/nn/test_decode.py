"""Decoding with a cache has the logits of whole sequences, for every mixer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from ldm_jax.mixers import AttnResBlockConfig, Form, HyperConfig, MixerConfig, MixerKind, Write
from ldm_jax.nn import model_graph
from ldm_jax.nn.attention import make_documents
from ldm_jax.nn.cache import init_cache, next_places
from models import MODEL, assert_close, logits, mixer, params_of, tokens

MIXERS = {
    "preln": mixer("preln"),
    "ldm": mixer(),
    "ldm_delta": mixer(write=Write.DELTA),
    "ldm_dual": mixer(form=Form.DUAL),
    "attnres": MixerConfig(MixerKind.ATTNRES),
    "attnres_block": MixerConfig(MixerKind.ATTNRES_BLOCK, attnres_block=AttnResBlockConfig(block_size=2)),
    "hc": MixerConfig(MixerKind.HC, hc=HyperConfig(streams=2)),
    "mhc": MixerConfig(MixerKind.MHC),
    "denseformer": MixerConfig(MixerKind.DENSEFORMER),
}
IDS = tokens(2, 12)


@functools.cache
def decoder(config, mixer_config):
    graph = model_graph(config, mixer_config)

    def decode(params, ids, cache):
        transformer = nnx.merge(graph, params)
        hidden, cache = transformer.decode(ids, cache)
        return transformer.logits(hidden), cache

    return jax.jit(decode)


def decoded(config, mixer_config, params, ids, window, pieces, start=None):
    """The logits of all tokens, decoded in pieces of these lengths."""
    start = jnp.zeros(ids.shape[0], jnp.int32) if start is None else start
    cache, found, place = init_cache(config, start, window), [], 0
    for count in pieces:
        piece, cache = decoder(config, mixer_config)(params, ids[:, place : place + count], cache)
        found.append(piece)
        place += count
    return jnp.concatenate(found, axis=1)


@pytest.mark.parametrize("name", MIXERS)
def test_decoding_equals_whole_sequences(name):
    # Sequences of all lengths from 1 to 8, which end together. Chunks and single tokens differ in the attention only,
    # so the other mixers decode in chunks of one length, which is one program less.
    mixer_config, longest = MIXERS[name], 8
    pieces = [3, 3, 1, 1] if name in ("preln", "ldm") else [4, 4]
    params, ids, start = params_of(MODEL, mixer_config), tokens(longest, longest), jnp.arange(longest)
    found = decoded(MODEL, mixer_config, params, ids, longest, pieces, start)
    from_zero = jnp.stack([jnp.roll(row, -place) for place, row in enumerate(ids)])  # later tokens do not matter
    expected = logits(MODEL, mixer_config, params, from_zero)
    for place in range(longest):
        assert_close(found[place, place:], expected[place, : longest - place])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ldm_dual", "attnres"])
def test_decoding_by_a_loop_over_layers(name):
    mixer_config, config = MIXERS[name], dataclasses.replace(MODEL, scan=False)
    params = params_of(config, mixer_config)
    expected = logits(config, mixer_config, params, IDS)
    assert_close(decoded(config, mixer_config, params, IDS, 12, [9, 1, 1, 1]), expected)


def test_the_oldest_slots_are_overwritten():
    # With one block, a token attends to the last four places, as it would at the end of a sequence of four tokens.
    config, mixer_config = dataclasses.replace(MODEL, depth=1), MIXERS["preln"]
    params = params_of(config, mixer_config)
    found = decoded(config, mixer_config, params, IDS, 4, [1] * 12)
    for place in (3, 7, 11):
        window = logits(config, mixer_config, params, IDS[:, place - 3 : place + 1])
        assert_close(found[:, place], window[:, -1])


def test_next_places():
    cache = init_cache(MODEL, jnp.asarray([0, 3]), 4)._replace(length=jnp.asarray(5))
    slots, positions, visible = next_places(cache, 1)
    assert slots.tolist() == [1]
    assert positions.tolist() == [[5], [2]]
    assert visible[:, 0].tolist() == [[True] * 4, [True, True, False, True]]  # the slots have places 4, 5, 2, 3


@pytest.mark.parametrize("name", ["ldm", "attnres"])
def test_documents_of_a_window_are_independent(name):
    mixer_config, half = MIXERS[name], 6
    params = params_of(MODEL, mixer_config)
    packed = logits(MODEL, mixer_config, params, IDS, jnp.asarray([[1] * half + [2] * half] * 2))
    assert_close(packed[:, :half], logits(MODEL, mixer_config, params, IDS[:, :half]))
    assert_close(packed[:, half:], logits(MODEL, mixer_config, params, IDS[:, half:]))


def test_positions_in_documents():
    documents = make_documents(jnp.asarray([[3, 3, 4, 4, 4, 5], [1, 1, 1, 1, 1, 1]]))
    assert documents.positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
