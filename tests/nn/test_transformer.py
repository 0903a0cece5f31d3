"""The model: equal forms are equal, the future is not seen, the memory is where it should be."""

import dataclasses
import functools

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
from models import LDM, MODEL, loss_and_grads, mixer, model, moved_params, tokens

KINDS = {
    "preln": mixer("preln"),
    "ldm": mixer("ldm"),
    "ldm-sqrt": mixer("ldm", write=Write.SQRT_RLS),
    "ldm-other": mixer("ldm", write_embedding=False, shared_key=True, write=Write.DELTA),
}
each_mixer = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def by(kind, backward):
    return dataclasses.replace(kind, backward=Backward(backward))


def doubled_loss_and_grads(config, kind, params):
    """In float64, with every state that is float32 otherwise."""
    return jax.tree.map(np.asarray, in_float64(lambda p: loss_and_grads(config, kind, p, tokens()))(params))


@functools.cache
def scanned(kind):
    """Parameters, and loss and gradients by a plain scan."""
    params = moved_params(MODEL, kind)
    return params, doubled_loss_and_grads(MODEL, by(kind, "stored"), params)


def assert_same(a, b, rtol):
    """Leaf by leaf, relative to the leaf's largest entry."""
    chex.assert_trees_all_equal_structs(a, b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * max(np.abs(y).max(), 1e-3))


@pytest.mark.parametrize(
    ("name", "options", "backward", "change"),
    [
        pytest.param("ldm", {}, "stored", {"scan": False}, marks=pytest.mark.slow),
        pytest.param("ldm", {}, "remat", {}, marks=pytest.mark.slow),
        ("ldm", {}, "reversible", {}),
        ("ldm", {"form": Form.DUAL}, "reversible", {}),
        pytest.param("ldm", {}, "remat", {"remat": Remat.DOTS}, marks=pytest.mark.slow),
        pytest.param("ldm", {}, "reversible", {"scan": False}, marks=pytest.mark.slow),
        pytest.param("ldm", {"form": Form.DUAL}, "reversible", {"scan": False}, marks=pytest.mark.slow),
        pytest.param("ldm-other", {}, "remat", {"scan": False}, marks=pytest.mark.slow),
        pytest.param("ldm-sqrt", {}, "reversible", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_same_numbers_another_way(name, options, backward, change):
    # The same parameters unrolled, recomputed, undone or without the memory. In float32 the whole gradient of any way,
    # the plain scan's, too, is up to 1e-5 from that in float64, and how far depends on the machine.
    kind = KINDS[name]
    params, expected = scanned(kind)
    other = by(dataclasses.replace(kind, ldm=dataclasses.replace(kind.ldm, **options)), backward)
    actual = doubled_loss_and_grads(dataclasses.replace(MODEL, **change), other, params)
    assert_same(actual, expected, 1e-10)


@pytest.mark.slow
def test_what_the_backward_pass_has_costs_memory():
    def temporary_bytes(backward, remat=Remat.BLOCK):
        kind = by(mixer(key_dim=8), backward)
        config = dataclasses.replace(MODEL, depth=12, remat=remat)
        graph, params = model_graph(config, kind), init_params(config, kind, 0)
        loss = lambda p, t: nnx.merge(graph, p).loss(t, t)  # noqa: E731
        compiled = jax.jit(jax.grad(loss)).lower(params, tokens(4, 64)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    stored, dots, recomputed = (
        temporary_bytes("stored"), temporary_bytes("remat", Remat.DOTS), temporary_bytes("remat")
    )  # fmt: skip
    assert temporary_bytes("reversible") < 0.8 * recomputed
    assert recomputed < 0.8 * dots
    assert dots < 0.8 * stored


def test_only_what_can_be_undone_is():
    assert mixer().backward_or_default is Backward.REVERSIBLE
    assert mixer(write=Write.DELTA).backward_or_default is Backward.REMAT
    assert mixer(write=Write.ADDITIVE, form=Form.DUAL).backward_or_default is Backward.REVERSIBLE
    for write in (Write.ADDITIVE, Write.DELTA):
        with pytest.raises(ValueError, match=f"{write} cannot be undone.*remat"):
            by(mixer(write=write), "reversible")
    by(mixer("preln", write=Write.DELTA), "reversible")


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_dual_weights_are_what_every_layer_contributes(scan):
    # After a last sublayer: the readout is the sum over all observations of weight times value.
    kind = mixer(form=Form.DUAL)
    params = moved_params(MODEL, kind)
    config = dataclasses.replace(MODEL, scan=scan)
    probe = model(config, kind, params)
    state = probe._apply_blocks(probe.mixer.start(probe.embed(tokens())))
    block = jax.tree.map(lambda x: x[0], probe.blocks)
    layer = block.attention.mixer.memory
    weights = layer.weights(state.memory, state.stream)
    assert weights.shape == (MODEL.sublayers + 1, *tokens().shape, LDM.groups)
    entries = state.memory.observations.entries
    values = entries.value if scan else jnp.stack([entry.value for entry in entries])
    total = jnp.sum(weights[..., None] * values, axis=0).reshape(state.stream.shape)
    np.testing.assert_allclose(layer.read(state.memory, state.stream), total, atol=1e-5)


def test_forward_mode_names_the_way_that_has_it():
    params = moved_params(MODEL, mixer())
    loss = lambda kind: lambda p: model(MODEL, kind, p).loss(tokens(), tokens())  # noqa: E731
    with pytest.raises(TypeError, match=r"mixer\.backward"):
        jax.jvp(loss(by(mixer(), "reversible")), (params,), (params,))


def test_local_attention_mixes_no_tokens():
    config = dataclasses.replace(MODEL, attention=AttentionImplementation.LOCAL)
    kind = mixer("preln")
    probe = model(config, kind, moved_params(config, kind))
    changed = tokens().at[:, 0].set(0).at[:, 3].set(1)
    same = jnp.all(probe(tokens()) == probe(changed), axis=-1)[0]
    np.testing.assert_array_equal(same, [position not in (0, 3) for position in range(same.size)])


@pytest.mark.parametrize("kind", [KINDS["ldm"], KINDS["ldm-other"]], ids=["ldm", "ldm-other"])
def test_the_future_is_not_seen(kind):
    # The gradient of the scores at position t with respect to the embedding at t' > t is exactly zero.
    params = moved_params(MODEL, kind)
    probe = model(MODEL, kind, params)
    ids = tokens()[:1]

    def scores(embedding):
        hidden = probe.norm(probe.mixer.finish(probe._apply_blocks(probe.mixer.start(embedding))))
        return jnp.sum(jnp.sin(probe.logits(hidden)[0]), axis=-1)  # [T]

    slopes = jax.jit(jax.jacrev(scores))(probe.embed(ids))[:, 0]  # [T, T', D]
    seen = np.abs(np.asarray(slopes)).sum(-1)
    assert np.all(seen[np.triu_indices(ids.shape[1], 1)] == 0)
    assert np.all(seen[np.tril_indices(ids.shape[1])] > 0)


def test_without_reads_ldm_is_preln():
    # Exactly: what is added is 0. All parameters but the mixer's are the same for both, by the same seed.
    ldm, preln = mixer("ldm"), mixer("preln")
    silent = without_reads(init_params(MODEL, ldm, 4))
    a = jax.jit(lambda p: model(MODEL, ldm, p)(tokens()))(silent)
    b = jax.jit(lambda p: model(MODEL, preln, p)(tokens()))(init_params(MODEL, preln, 4))
    np.testing.assert_array_equal(a, b)


def test_reads_change_the_scores():
    # The companion of the test above: with gains, and with any option changed, the scores differ.
    base = mixer("ldm")
    params = moved_params(MODEL, base)
    heard, silent = (model(MODEL, base, p)(tokens()) for p in (params, without_reads(params)))
    assert float(jnp.abs(heard - silent).max()) > 1e-2
    for options in ({"write": Write.ADDITIVE}, {"alpha": 1.0}, {"unit_keys": False}):
        other = model(MODEL, mixer("ldm", **options), params)(tokens())
        assert float(jnp.abs(heard - other).max()) > 1e-3, options


def test_embedding_as_observation_0():
    # With it, the first sublayer reads something; without it, an empty memory.
    for write_embedding in (True, False):
        kind = mixer("ldm", write_embedding=write_embedding)
        probe = model(MODEL, kind, moved_params(MODEL, kind))
        state = probe.mixer.start(probe.embed(tokens()))
        assert bool(jnp.any(state.memory.memory != 0)) == write_embedding


@each_mixer
def test_bfloat16_keeps_float32_where_it_must(kind):
    config = dataclasses.replace(MODEL, compute_dtype=ComputeType.BFLOAT16)
    probe = model(config, kind, init_params(config, kind, 0))
    assert {leaf.dtype for leaf in jax.tree.leaves(probe)} == {jnp.dtype(jnp.float32)}
    assert jax.eval_shape(probe.hidden, tokens()).dtype == jnp.bfloat16
    assert jax.eval_shape(probe.loss, tokens(), tokens()).dtype == jnp.float32
    state = jax.eval_shape(lambda t: probe._apply_blocks(probe.mixer.start(probe.embed(t))), tokens())
    if kind.kind == "ldm":
        assert state.stream.dtype == jnp.bfloat16
        assert {part.dtype for part in jax.tree.leaves(state.memory)} == {jnp.dtype(jnp.float32)}
    # and every scan in the traced program carries those same types
    text = str(jax.make_jaxpr(lambda t: probe(t))(tokens()))
    assert "bf16[" in text
    assert "f16[2,9,2,3,8]" not in text  # no half-precision copy of M
    assert ("f32[2,9,2,3,8]" in text) == (kind.kind == "ldm")


def test_bfloat16_is_near_float32():
    params = moved_params(MODEL, mixer())
    half = dataclasses.replace(MODEL, compute_dtype=ComputeType.BFLOAT16)
    a, b = (float(loss_and_grads(config, mixer(), params, tokens())[0]) for config in (MODEL, half))
    assert a == pytest.approx(b, rel=2e-2)  # bfloat16 has 8 bits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_number_of_parameters(tied, qk_norm):
    config = dataclasses.replace(MODEL, tied=tied, qk_norm=qk_norm)
    D, S, F, N = config.width, config.vocabulary, config.mlp_width, config.depth
    head, J = config.head_dim, 2
    attention = D * D + 2 * D * J * head + D * D + (2 * head if qk_norm else 0)
    block = attention + 3 * D * F + 2 * D
    G, K, R = LDM.groups, LDM.key_dim, LDM.latent_dim
    reader = D * R + R + R * G * K + (R * G + G) + G
    writer = D * R + R + R * G * K + (R * G + G)
    layer = reader + writer + G
    expected = {"embedding": S * D * (1 if tied else 2), "blocks": N * block + D, "mixer": 0}
    shapes = lambda kind: jax.eval_shape(lambda: init_params(config, mixer(kind), 0))  # noqa: E731
    assert count_parameters(shapes("preln")) == expected
    expected["mixer"] = 2 * N * layer + reader + writer
    assert count_parameters(shapes("ldm")) == expected


def test_blocks_differ_at_the_start():
    params = init_params(MODEL, mixer(), 0)
    kernels = params["blocks"]["attention"]["function"]["query"]["kernel"]
    assert kernels.shape[0] == MODEL.depth
    assert float(jnp.abs(kernels[0] - kernels[1]).max()) > 0.1


def test_grouped_queries_equal_repeated_heads():
    # J key-value heads shared by H query heads equal H of them, copied.
    shared, kind = dataclasses.replace(MODEL, kv_heads=2), mixer("preln")
    full = dataclasses.replace(MODEL, kv_heads=4)
    params = moved_params(shared, kind)
    copied = jax.tree.map(lambda x: x, params)
    function = copied["blocks"]["attention"]["function"]
    for name in ("key", "value"):
        kernel = function[name]["kernel"]
        by_head = kernel.reshape(*kernel.shape[:2], 2, shared.head_dim)
        function[name] = {"kernel": jnp.repeat(by_head, 2, axis=2).reshape(*kernel.shape[:2], -1)}
    np.testing.assert_allclose(
        model(shared, kind, params)(tokens()), model(full, kind, copied)(tokens()), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 3}, "heads is 3, which does not divide the width 16"),
        ({"kv_heads": 3}, "kv_heads is 3"),
        ({"width": 4}, "width 1"),
        ({"depth": 0}, "depth is 0"),
        ({"loss_chunk": 0}, "loss_chunk is 0"),
        ({"attention": "cudnn"}, "bfloat16"),
    ],
)
def test_inadmissible_models(options, words):

    if "attention" in options:
        options = {"attention": AttentionImplementation(options["attention"])}
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(MODEL, **options)
    assert ModelConfig()
