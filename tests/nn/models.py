"""Small models for the tests."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ldm_jax.config import ModelConfig
from ldm_jax.mixers import LDMConfig, MixerConfig, MixerKind
from ldm_jax.nn import init_params, model_graph

MODEL = ModelConfig(depth=2, width=16, heads=4, kv_heads=2, mlp_width=24, vocabulary=11, loss_chunk=7)
LDM = LDMConfig(groups=2, key_dim=3, latent_dim=5)


def mixer(kind="ldm", **options):
    return MixerConfig(kind=MixerKind(kind), ldm=dataclasses.replace(LDM, **options))


def model(config, mixer_config, params):
    return nnx.merge(model_graph(config, mixer_config), params)


def moved_params(config, mixer_config, seed=0):
    """Parameters away from their start, so that gates and norms are not at special values."""
    params = init_params(config, mixer_config, seed)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    return jax.tree.unflatten(
        tree,
        [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)],
    )


def tokens(batch=2, length=9, vocabulary=MODEL.vocabulary):
    return jax.random.randint(jax.random.key(3), (batch, length), 0, vocabulary, jnp.int32)


def loss_and_grads(config, mixer_config, params, windows):
    return jax.jit(jax.value_and_grad(lambda p: model(config, mixer_config, p).loss(windows[:, :-1], windows[:, 1:])))(
        params
    )
