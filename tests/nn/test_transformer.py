"""The model: backward modes and forms with the same gradients, causality, types, and the memory's place in it."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from doubled import in_float64
from ldm_jax.config import AttentionImplementation, ComputeType, ModelConfig, Remat
from ldm_jax.memory import Backward
from ldm_jax.mixers import Form, Write, without_reads
from ldm_jax.nn import count_parameters, init_params, model_graph
from models import (
    LDM,
    MODEL,
    assert_causal,
    assert_close,
    logits,
    mixer,
    model,
    params_of,
    shapes,
    tokens,
    with_backward,
)

MIXERS = {
    "preln": mixer("preln"),
    "ldm": mixer("ldm"),
    "ldm-sqrt": mixer("ldm", write=Write.SQRT_RLS),
    "ldm-other": mixer("ldm", write_embedding=False, shared_key=True, write=Write.DELTA),
}
each_mixer = pytest.mark.parametrize("mixer_config", MIXERS.values(), ids=MIXERS.keys())


def loss_and_grads_in_float64(config, mixer_config, params):
    """The loss and its gradients, with every float32 of the computation, states included, in float64."""
    ids = tokens()
    loss = lambda params: model(config, mixer_config, params).loss(ids[:, :-1], ids[:, 1:])  # noqa: E731
    return jax.tree.map(np.asarray, in_float64(jax.value_and_grad(loss))(params))


@functools.cache
def stored_by_a_scan(mixer_config):
    """`loss_and_grads_in_float64` by a scan in the backward mode stored."""
    return loss_and_grads_in_float64(MODEL, with_backward(mixer_config, "stored"), params_of(MODEL, mixer_config))


@pytest.mark.parametrize(
    ("name", "options", "backward", "change"),
    [
        ("ldm", {}, "reversible", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("ldm", {}, "stored", {"scan": False}),
                ("ldm", {}, "remat", {}),
                ("ldm", {}, "remat", {"remat": Remat.DOTS}),
                ("ldm", {}, "reversible", {"scan": False}),
                ("ldm", {"form": Form.DUAL}, "reversible", {}),
                ("ldm", {"form": Form.DUAL}, "reversible", {"scan": False}),
                ("ldm-other", {}, "remat", {"scan": False}),
                ("ldm-sqrt", {}, "reversible", {}),
            )
        ),
    ],
    ids=str,
)
def test_backward_modes_and_forms_have_the_same_gradients(name, options, backward, change):
    # In float64, because in float32 the gradients of every mode, stored included, have errors of 1e-5 that depend on
    # the CPU.
    mixer_config = MIXERS[name]
    other = dataclasses.replace(mixer_config, ldm=dataclasses.replace(mixer_config.ldm, **options))
    config, params = dataclasses.replace(MODEL, **change), params_of(MODEL, mixer_config)
    actual = loss_and_grads_in_float64(config, with_backward(other, backward), params)
    expected = stored_by_a_scan(mixer_config)
    chex.assert_trees_all_equal_structs(actual, expected)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # Relative to the leaf's largest entry; leaves below a thousandth of the largest count as that large.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10 * max(np.abs(b).max(), 1e-3 * largest))


@pytest.mark.slow
def test_memory_of_the_backward_modes():
    def temporary_bytes(backward, remat=Remat.BLOCK):
        mixer_config = with_backward(mixer(key_dim=8), backward)
        config = dataclasses.replace(MODEL, depth=12, remat=remat)
        graph = model_graph(config, mixer_config)
        loss = lambda p, t: nnx.merge(graph, p).loss(t, t)  # noqa: E731
        compiled = jax.jit(jax.grad(loss)).lower(shapes(config, mixer_config), tokens(4, 64)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    stored, dots, remat = (
        temporary_bytes("stored"), temporary_bytes("remat", Remat.DOTS), temporary_bytes("remat")
    )  # fmt: skip
    assert temporary_bytes("reversible") < 0.8 * remat
    assert remat < 0.8 * dots
    assert dots < 0.8 * stored


def test_default_backward_mode():
    assert mixer().backward_or_default is Backward.REVERSIBLE
    assert mixer(write=Write.DELTA).backward_or_default is Backward.REMAT
    assert mixer(write=Write.ADDITIVE, form=Form.DUAL).backward_or_default is Backward.REVERSIBLE
    for write in (Write.ADDITIVE, Write.DELTA):
        with pytest.raises(ValueError, match=rf"backward is reversible.*{write}.*remat"):
            with_backward(mixer(write=write), "reversible")
    with_backward(mixer("preln", write=Write.DELTA), "reversible")


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_dual_weights_are_the_contributions_to_a_read(scan):
    # After the last sublayer: the readout is the sum over all observations of weight times value.
    mixer_config = mixer(form=Form.DUAL)
    config = dataclasses.replace(MODEL, scan=scan)

    @jax.jit
    def read_and_weights(params):
        transformer = model(config, mixer_config, params)
        state = transformer._apply_blocks(transformer.mixer.start(transformer.embedding(tokens())))
        block = jax.tree.map(lambda x: x[0], transformer.blocks)
        layer = block.attention.mixer.memory
        entries = state.memory.observations.entries
        values = entries.value if scan else jnp.stack([entry.value for entry in entries])
        return layer.read(state.memory, state.stream), layer.weights(state.memory, state.stream), values

    read, weights, values = read_and_weights(params_of(MODEL, mixer_config))
    assert weights.shape == (MODEL.sublayers + 1, *tokens().shape, LDM.groups)
    assert_close(read, jnp.sum(weights[..., None] * values, axis=0).reshape(read.shape), 2e-6)


def test_local_attention_mixes_no_tokens():
    config = dataclasses.replace(MODEL, attention=AttentionImplementation.LOCAL)
    params, changed = params_of(config, mixer("preln")), tokens().at[:, 0].set(0).at[:, 3].set(1)
    before, after = (logits(config, mixer("preln"), params, ids) for ids in (tokens(), changed))
    same = jnp.all(before == after, axis=-1)[0]
    np.testing.assert_array_equal(same, [position not in (0, 3) for position in range(same.size)])


@pytest.mark.parametrize("name", ["ldm", "ldm-other"])
def test_causality(name):
    assert_causal(MIXERS[name])


def test_without_reads_ldm_equals_preln():
    # Exactly, because the reads add 0. All parameters but the mixer's are the same for the same seed.
    ldm, preln = mixer("ldm"), mixer("preln")
    params = without_reads(init_params(MODEL, ldm, 4))
    a, b = (logits(MODEL, *case, tokens()) for case in ((ldm, params), (preln, init_params(MODEL, preln, 4))))
    np.testing.assert_array_equal(a, b)
    # The blocks of a model have different parameters.
    kernels = params["blocks"]["attention"]["function"]["query"]["kernel"]
    assert kernels.shape[0] == MODEL.depth
    assert float(jnp.abs(kernels[0] - kernels[1]).max()) > 0.1


def test_reads_change_the_logits():
    params = params_of(MODEL, mixer("ldm"))
    a, b = (logits(MODEL, mixer("ldm"), own, tokens()) for own in (params, without_reads(params)))
    assert float(jnp.abs(a - b).max()) > 1e-2 * float(jnp.abs(a).max())


@pytest.mark.parametrize("write_embedding", [True, False])
def test_the_embedding_is_observation_0(write_embedding):
    mixer_config = mixer("ldm", write_embedding=write_embedding)

    def first_memory(params):
        transformer = model(MODEL, mixer_config, params)
        return transformer.mixer.start(transformer.embedding(tokens())).memory.memory

    memory = jax.jit(first_memory)(params_of(MODEL, mixer_config))
    assert bool(jnp.any(memory != 0)) == write_embedding


@each_mixer
def test_float32_parts_under_bfloat16(mixer_config):
    config = dataclasses.replace(MODEL, compute_dtype=ComputeType.BFLOAT16)
    params = shapes(config, mixer_config)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}

    def run(params):
        transformer = model(config, mixer_config, params)
        first = transformer.mixer.start(transformer.embedding(tokens()))
        hidden, loss = transformer.hidden(tokens()), transformer.loss(tokens(), tokens())
        return first, hidden, loss

    first, hidden, loss = jax.eval_shape(run, params)
    assert hidden.dtype == jnp.bfloat16
    assert loss.dtype == jnp.float32
    if mixer_config.kind == "ldm":
        assert first.stream.dtype == jnp.bfloat16
        assert {part.dtype for part in jax.tree.leaves(first.memory)} == {jnp.dtype(jnp.float32)}
    # Every scan of the traced program carries the same types.
    text = str(jax.make_jaxpr(run)(params))
    assert "bf16[" in text
    assert "f16[2,9,2,3,8]" not in text  # no half-precision copy of M
    assert ("f32[2,9,2,3,8]" in text) == (mixer_config.kind == "ldm")


@pytest.mark.parametrize("kind", ["preln", "ldm", "hc", "mhc"])
def test_accelerators_do_not_round_float32_products(kind):
    # By default a TPU rounds the operands of a float32 matmul to bfloat16, and recent GPUs to 10 bits.
    config = dataclasses.replace(MODEL, compute_dtype=ComputeType.BFLOAT16)

    def gradient(params):
        return jax.grad(lambda params: model(config, mixer(kind), params).loss(tokens(), tokens()))(params)

    program = jax.jit(gradient).lower(shapes(config, mixer(kind))).as_text()
    products = re.findall(r"dot_general .*?(precision = \[\w+, \w+\])?(?: \{.*\})? : \((.*)\) ->", program)
    exact = [precision for precision, operands in products if operands.count("xf32>") == 2]
    assert set(exact) <= {"precision = [HIGHEST, HIGHEST]"}
    assert bool(exact) == (kind != "preln")
    assert len(products) > len(exact)


def test_the_loss_under_bfloat16_is_that_of_unrounded_logits():
    config = dataclasses.replace(MODEL, compute_dtype=ComputeType.BFLOAT16)
    transformer = model(config, mixer("preln"), params_of(config, mixer("preln")))
    hidden, head = (np.asarray(x, np.float64) for x in (transformer.hidden(tokens()), transformer.head_matrix()))
    logits = hidden @ head
    own = np.take_along_axis(logits, np.asarray(tokens())[..., None], axis=-1)[..., 0]
    expected = np.log(np.exp(logits).sum(axis=-1)) - own
    found = np.asarray(transformer.token_losses(tokens(), tokens()).cross_entropy)
    # Rounded logits are off by up to 2^-9 of their size, float32 sums of 16 products by 1e-6.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(logits).max())
    np.testing.assert_allclose(transformer(tokens()), logits, rtol=0, atol=1e-5 * np.abs(logits).max())


def test_bfloat16_is_close_to_float32():
    params = params_of(MODEL, mixer())
    configs = MODEL, dataclasses.replace(MODEL, compute_dtype=ComputeType.BFLOAT16)
    a, b = (
        float(jax.jit(lambda p, config=config: model(config, mixer(), p).loss(tokens(), tokens()))(params))
        for config in configs
    )
    assert a == pytest.approx(b, rel=2e-2)  # bfloat16 has 8 bits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_number_of_parameters(tied, qk_norm):
    config = dataclasses.replace(MODEL, tied=tied, qk_norm=qk_norm)
    D, S, F, N = config.width, config.vocabulary, config.mlp_width, config.depth
    head, J = config.head_dim_or_default, 2
    attention = D * D + 2 * D * J * head + D * D + (2 * head if qk_norm else 0)
    block = attention + 3 * D * F + 2 * D
    G, K, R = LDM.groups, LDM.key_dim, LDM.latent_dim
    reader = D * R + R + R * G * K + (R * G + G) + G
    writer = D * R + R + R * G * K + (R * G + G)
    layer = reader + writer + G
    expected = {"embedding": S * D * (1 if tied else 2), "blocks": N * block + D, "mixer": 0}
    assert count_parameters(shapes(config, mixer("preln"))) == expected
    expected["mixer"] = 2 * N * layer + reader + writer
    assert count_parameters(shapes(config, mixer("ldm"))) == expected


def test_grouped_queries_equal_repeated_heads():
    # J key-value heads, each shared by H / J query heads, equal H key-value heads that are copies of them.
    shared, full = MODEL, dataclasses.replace(MODEL, kv_heads=4)
    params = params_of(shared, mixer("preln"))
    copied = jax.tree.map(lambda x: x, params)
    function = copied["blocks"]["attention"]["function"]
    for name in ("key", "value"):
        kernel = function[name]["kernel"]
        by_head = kernel.reshape(*kernel.shape[:2], 2, shared.head_dim_or_default)
        function[name] = {"kernel": jnp.repeat(by_head, 2, axis=2).reshape(*kernel.shape[:2], -1)}
    expected = logits(full, mixer("preln"), copied, tokens())
    assert_close(logits(shared, mixer("preln"), params, tokens()), expected, 2e-6)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"heads": 3}, "heads is 3.*width 16"),
        ({"kv_heads": 3}, "kv_heads is 3"),
        ({"width": 4}, "width / heads is 1"),
        ({"depth": 0}, "depth is 0"),
        ({"loss_chunk": 0}, "loss_chunk is 0"),
        ({"attention": AttentionImplementation.CUDNN}, "bfloat16"),
    ],
)
def test_options_out_of_range(options, pattern):
    with pytest.raises(ValueError, match=pattern):
        dataclasses.replace(MODEL, **options)
    assert ModelConfig()
