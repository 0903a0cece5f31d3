"""The baselines in the model: float32 controllers under bfloat16, causality, memory that is linear in depth."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldm_jax.config import AttentionImplementation, ComputeType, ModelConfig
from ldm_jax.mixers import AttnResBlockConfig, DenseFormerConfig, MixerConfig, MixerKind
from ldm_jax.nn import init_params, model_graph
from models import MODEL, tokens

BASELINES = {
    "attnres": MixerConfig(kind=MixerKind.ATTNRES),
    "attnres_block": MixerConfig(kind=MixerKind.ATTNRES_BLOCK, attnres_block=AttnResBlockConfig(3)),
    "hc": MixerConfig(kind=MixerKind.HC),
    "mhc": MixerConfig(kind=MixerKind.MHC),
    "denseformer": MixerConfig(kind=MixerKind.DENSEFORMER, denseformer=DenseFormerConfig(2, 2)),
}
each_baseline = pytest.mark.parametrize("kind", BASELINES.values(), ids=BASELINES.keys())


@each_baseline
def test_controllers_are_float32_whatever_the_compute_type(kind):
    config = dataclasses.replace(MODEL, compute_dtype=ComputeType.BFLOAT16)
    params = init_params(config, kind, 0)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    model = nnx.merge(model_graph(config, kind), params)
    # Coefficients are products and softmaxes over the width or over depth: none of them is in bfloat16.
    layer = jax.tree.map(lambda x: x[0], model.blocks).mlp.mixer
    state = model.mixer.start(model.embed(tokens()))
    assert all(leaf.dtype in (jnp.bfloat16, jnp.int32) for leaf in jax.tree.leaves(state))
    jaxpr = str(jax.make_jaxpr(lambda state: layer.read(state)[0])(state))
    for line in jaxpr.splitlines():
        if any(name in line for name in (" exp ", " logistic ", " dot_general", " reduce_sum", " tanh ")):
            assert ":bf16" not in line.split("=")[0], line
    assert model(tokens()).dtype == jnp.float32


@each_baseline
def test_the_future_is_not_seen(kind):
    params = init_params(MODEL, kind, 0)
    graph = model_graph(MODEL, kind)

    def loss_of_first(embedded):
        model = nnx.merge(graph, params)
        hidden = model.mixer.finish(model._apply_blocks(model.mixer.start(embedded)))
        return jnp.sum(hidden[:, 0] ** 2)

    embedded = jax.random.normal(jax.random.key(0), (1, 4, MODEL.width))
    grads = jax.jit(jax.grad(loss_of_first))(embedded)
    assert float(jnp.abs(grads[:, 0]).max()) > 0
    np.testing.assert_array_equal(grads[:, 1:], 0)


@pytest.mark.parametrize(
    "name", ["attnres", *(pytest.param(name, marks=pytest.mark.slow) for name in BASELINES if name != "attnres")]
)
def test_memory_grows_by_as_much_with_every_block(name):
    # Whatever is saved once per layer and is as long as the depth would make the second slope twice the first.
    kind = BASELINES[name]
    config = ModelConfig(width=64, heads=1, mlp_width=64, attention=AttentionImplementation.LOCAL, loss_chunk=64)

    def temporary_bytes(depth):
        deep = dataclasses.replace(config, depth=depth)
        graph = model_graph(deep, kind)
        params = jax.eval_shape(lambda: init_params(deep, kind, 0))
        loss = lambda params, tokens: nnx.merge(graph, params).loss(tokens, tokens)  # noqa: E731
        compiled = jax.jit(jax.grad(loss)).lower(params, jnp.zeros((1, 512), jnp.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, some, many = map(temporary_bytes, (12, 24, 48))
    assert (many - some) / 24 < 1.05 * (some - few) / 12
