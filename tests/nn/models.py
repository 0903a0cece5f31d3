"""Small models with random parameters, shared by the tests of nn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ldm_jax.config import ModelConfig
from ldm_jax.memory import Backward
from ldm_jax.mixers import LDMConfig, MixerConfig, MixerKind
from ldm_jax.nn import init_params, model_graph
from random_params import random_params

MODEL = ModelConfig(depth=2, width=16, heads=4, kv_heads=2, mlp_width=24, vocabulary=11, loss_chunk=7)
LDM = LDMConfig(groups=2, key_dim=3, latent_dim=5)


def mixer(kind="ldm", **options):
    return MixerConfig(kind=MixerKind(kind), ldm=dataclasses.replace(LDM, **options))


def with_backward(mixer_config, backward):
    return dataclasses.replace(mixer_config, backward=Backward(backward))


def model(config, mixer_config, params):
    return nnx.merge(model_graph(config, mixer_config), params)


@functools.cache
def shapes(config, mixer_config):
    """The shapes of the parameters."""
    return jax.eval_shape(lambda: init_params(config, mixer_config, 0))


@functools.cache
def params_of(config, mixer_config):
    """Random parameters."""
    return random_params(shapes(config, mixer_config))


def tokens(batch=2, length=9, vocabulary=MODEL.vocabulary):
    return jax.random.randint(jax.random.key(3), (batch, length), 0, vocabulary, jnp.int32)


@functools.cache
def logits_function(config, mixer_config):
    """`(params, tokens, segments) -> logits`, compiled once for all tests of a file."""

    def logits(params, ids, segments=None):
        transformer = model(config, mixer_config, params)
        return transformer.logits(transformer.hidden(ids, segments)).astype(jnp.float32)

    return jax.jit(logits)


def logits(config, mixer_config, params, ids, segments=None):
    return logits_function(config, mixer_config)(params, ids, segments)


def assert_close(actual, expected, tolerance=1e-5):
    """Relative to the largest entry. By default a hundred float32 roundings, for the layers of a model."""
    expected = np.asarray(expected, np.float64)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=0, atol=tolerance * np.abs(expected).max()
    )


def assert_causal(mixer_config):
    """The gradient of the hidden state at position t by the embedding at position t' > t is exactly 0."""
    ids = jnp.arange(6)[None]  # every position has its own row of the embedding
    mixer_config = with_backward(mixer_config, "stored")
    params = params_of(MODEL, mixer_config)

    def score(table, weights):
        transformer = model(MODEL, mixer_config, params | {"embed": {"embedding": table}})
        return jnp.sum(weights * jnp.sum(jnp.sin(transformer.hidden(ids)[0]), axis=-1))

    gradient = jax.jit(jax.grad(score))
    slopes = [gradient(params["embed"]["embedding"], weights) for weights in jnp.eye(ids.size)]
    sizes = np.abs(np.asarray(slopes)).sum(-1)[:, : ids.size]  # [t, t']
    assert np.all(sizes[np.triu_indices(ids.size, 1)] == 0)
    assert np.all(sizes[np.tril_indices(ids.size)] > 0)
