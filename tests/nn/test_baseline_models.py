"""The baselines in the model: float32 coefficients under bfloat16, causality, memory that is linear in depth."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from ldm_jax.config import AttentionImplementation, ComputeType, ModelConfig
from ldm_jax.mixers import AttnResBlockConfig, DenseFormerConfig, MixerConfig, MixerKind
from ldm_jax.nn import model_graph
from models import MODEL, assert_causal, model, shapes, tokens

BASELINES = {
    "attnres": MixerConfig(kind=MixerKind.ATTNRES),
    "attnres_block": MixerConfig(kind=MixerKind.ATTNRES_BLOCK, attnres_block=AttnResBlockConfig(3)),
    "hc": MixerConfig(kind=MixerKind.HC),
    "mhc": MixerConfig(kind=MixerKind.MHC),
    "denseformer": MixerConfig(kind=MixerKind.DENSEFORMER, denseformer=DenseFormerConfig(2, 2)),
}
each_baseline = pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES.keys())


@each_baseline
def test_coefficients_are_float32_for_every_compute_type(baseline):
    config = dataclasses.replace(MODEL, compute_dtype=ComputeType.BFLOAT16)
    params = shapes(config, baseline)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))

    def first_state(params):
        transformer = model(config, baseline, params)
        return transformer.mixer.start(transformer.embedding(tokens()))

    def first_read(params, state):
        block = jax.tree.map(lambda x: x[0], model(config, baseline, params).blocks)
        return block.mlp.mixer.read(state)[0]

    state = jax.eval_shape(first_state, params)
    assert all(leaf.dtype in (jnp.bfloat16, jnp.int32) for leaf in jax.tree.leaves(state))
    # Coefficients are computed by matmuls and softmaxes over the width or over depth: none of them is in bfloat16.
    for line in str(jax.make_jaxpr(first_read)(params, state)).splitlines():
        if any(name in line for name in (" exp ", " logistic ", " dot_general", " reduce_sum", " tanh ")):
            assert ":bf16" not in line.split("=")[0], line
    assert jax.eval_shape(lambda params: model(config, baseline, params)(tokens()), params).dtype == jnp.float32


@each_baseline
def test_causality(baseline):
    assert_causal(baseline)


@pytest.mark.parametrize(
    "name", ["attnres", *(pytest.param(name, marks=pytest.mark.slow) for name in BASELINES if name != "attnres")]
)
def test_memory_is_linear_in_depth(name):
    # An array that is saved once per layer and is as long as the depth would make the second slope twice the first.
    baseline = BASELINES[name]
    config = ModelConfig(width=64, heads=1, mlp_width=64, attention=AttentionImplementation.LOCAL, loss_chunk=64)

    def temporary_bytes(depth):
        deep = dataclasses.replace(config, depth=depth)
        graph, params = model_graph(deep, baseline), shapes(deep, baseline)
        loss = lambda params, ids: nnx.merge(graph, params).loss(ids, ids)  # noqa: E731
        compiled = jax.jit(jax.grad(loss)).lower(params, jax.ShapeDtypeStruct((1, 512), jnp.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, some, many = map(temporary_bytes, (12, 24, 48))
    assert (many - some) / 24 < 1.05 * (some - few) / 12
