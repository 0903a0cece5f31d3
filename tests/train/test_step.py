"""The training step against AdamW written out, the learning rate schedules, and accumulation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ldm_jax.config import Decay, ModelConfig, OptimizerConfig, OptimizerName, Schedule
from ldm_jax.data import Batch
from ldm_jax.mixers import MixerConfig, MixerKind
from ldm_jax.nn import model_declarations, model_graph, parts_of
from ldm_jax.runs import fingerprint as fingerprints
from ldm_jax.runs.fingerprint import fingerprint
from ldm_jax.runs.state import LossRecord
from ldm_jax.train import make_state, make_train_step
from ldm_jax.train.optimizer import decays, learning_rate_schedule
from ldm_jax.train.step import MIN_LOSSES, is_spike, record_loss
from runs import assert_same_bits, tiny, with_optimizer, with_train, without_memory


def batch(size=4):
    return Batch(np.random.default_rng(0).integers(256, size=(size, 17)).astype(np.int32), None)


def test_one_update_is_adamw(tmp_path):
    config = with_optimizer(without_memory(tiny(tmp_path)), clip_norm=0.5, weight_decay=0.3, learning_rate=0.01)
    state = make_state(config)
    params = jax.tree.map(np.asarray, state.params)
    graph = model_graph(config.model, config.mixer)
    windows = jnp.asarray(batch().tokens)
    loss_of = jax.jit(jax.value_and_grad(lambda p: nnx.merge(graph, p).loss(windows[:, :-1], windows[:, 1:])))
    loss, grads = loss_of(state.params)
    norm = float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(grads))))
    assert norm > 0.5  # so that the clip is at work
    after, metrics = make_train_step(config)(state, batch())
    assert float(metrics.loss) == pytest.approx(float(loss), rel=1e-6)
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert float(metrics.learning_rate) == pytest.approx(0.005)  # the first of two warm-up steps

    def updated(param, grad, is_matrix):
        # Adam's first step: mean / (sqrt(mean square) + 1e-8), both corrected for their start at zero
        grad = np.asarray(grad, np.float64) * 0.5 / norm
        return param - 0.005 * (grad / (np.abs(grad) + 1e-8) + 0.3 * is_matrix * param)

    expected = jax.tree.map(updated, params, grads, decays(params, model_declarations(config.model, config.mixer)))
    for got, want, grad in zip(*(jax.tree.leaves(tree) for tree in (after.params, expected, grads)), strict=True):
        clear = np.abs(grad) > 1e-5  # elsewhere the gradient's sign, and so Adam's first step, is rounding error
        np.testing.assert_allclose(np.where(clear, got, 0), np.where(clear, want, 0), atol=2e-5)


def test_only_matrices_decay(tmp_path):
    config = tiny(tmp_path)
    params = make_state(config).params
    decayed = decays(params, model_declarations(config.model, config.mixer))
    for (path, leaf), flag in zip(
        jax.tree_util.tree_flatten_with_path(params)[0], jax.tree.leaves(decayed), strict=True
    ):
        stacked = path[0].key == "blocks"
        assert flag == (leaf.ndim - stacked >= 2), path


@pytest.mark.parametrize(
    ("kind", "decaying", "muon"),  # what the papers say: hc's dynamic maps and mhc's phi, not the static coefficients
    [
        (MixerKind.HC, {"dynamic/write_to", "dynamic/read_from", "dynamic/carry"}, {"dynamic/carry"}),
        (MixerKind.MHC, {"phi"}, {"phi"}),
    ],
)
def test_declarations_of_hyper_connections(kind, decaying, muon):
    declared = model_declarations(ModelConfig(depth=2, width=16, heads=2, mlp_width=16), MixerConfig(kind))
    mixer = {
        "/".join(path[path.index("mixer") + 1 :]): declaration
        for path, declaration in declared.items()
        if "mixer" in path
    }
    assert {name for name, declaration in mixer.items() if declaration.decays} == decaying
    assert {name for name, declaration in mixer.items() if declaration.muon} == muon


def test_accumulation_does_not_change_the_step(tmp_path):
    config = without_memory(tiny(tmp_path))
    parts = with_train(config, accumulation=2)
    # Two steps, because Adam's first depends on signs only. Rounding differs between orders of summation, and Adam
    # divides it by a small root: losses and gradient norms are compared tightly, parameters relative to a rate of .003.
    results = []
    for each in (config, parts):
        state, step = make_state(each), make_train_step(each)
        state, first = step(state, batch())
        state, second = step(state, batch())
        results.append((first, second, state))
    for a, b in zip(results[0][:2], results[1][:2], strict=True):
        np.testing.assert_allclose(a[:2], b[:2], rtol=1e-4)
    for a, b in zip(*(jax.tree.leaves(result[2].params) for result in results), strict=True):
        assert float(jnp.mean(jnp.abs(a - b))) < 1e-5


def test_state_types(tmp_path):
    from ldm_jax.config import ComputeType

    config = tiny(tmp_path)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype=ComputeType.BFLOAT16))
    state, _ = jax.eval_shape(make_train_step(config), jax.eval_shape(lambda: make_state(config)), batch())
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}


def test_learning_rate_schedules():
    cosine = learning_rate_schedule(OptimizerConfig(warmup_steps=10, learning_rate=1.0), 100)
    np.testing.assert_allclose([cosine(t) for t in (0, 4, 9, 10)], [0.1, 0.5, 1.0, 1.0], rtol=1e-5)
    np.testing.assert_allclose((cosine(54) + cosine(55)) / 2, 0.1 + 0.9 * 0.5, rtol=1e-5)  # halfway down
    constant = learning_rate_schedule(
        OptimizerConfig(warmup_steps=10, learning_rate=1.0, schedule=Schedule.CONSTANT, final_learning_rate=0.0), 100
    )
    np.testing.assert_allclose([constant(t) for t in (0, 9, 50, 79, 89, 99)], [0.1, 1, 1, 1, 0.5, 0], atol=1e-6)

    crowded = learning_rate_schedule(  # a decay never begins before the end of the warm-up
        OptimizerConfig(warmup_steps=50, learning_rate=1.0, schedule=Schedule.CONSTANT, decay_fraction=0.8), 100
    )
    np.testing.assert_allclose([crowded(t) for t in (49, 74, 99)], [1.0, 0.55, 0.1], atol=1e-6)


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 50), (3, 3), (10, 0)])
def test_short_runs_have_a_positive_learning_rate(schedule, steps, warmup):
    config = OptimizerConfig(warmup_steps=warmup, schedule=schedule, learning_rate=1.0)
    rate = learning_rate_schedule(config, steps)
    assert all(0 < float(rate(t)) <= 1 + 1e-6 for t in range(steps))


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("decay", list(Decay))
@pytest.mark.parametrize(("steps", "fraction"), [(1, 0.2), (2, 0.5), (100, 0.01), (100, 0.2)])
def test_the_last_step_has_the_final_learning_rate(schedule, decay, steps, fraction):
    config = OptimizerConfig(schedule=schedule, decay=decay, decay_fraction=fraction, learning_rate=1.0)
    assert learning_rate_schedule(config, steps)(steps - 1) == np.float32(0.1)


def test_square_root_decay():
    rate = learning_rate_schedule(
        OptimizerConfig(
            warmup_steps=10, learning_rate=1.0, schedule=Schedule.CONSTANT, decay=Decay.SQRT, final_learning_rate=0.1
        ),
        100,
    )
    np.testing.assert_allclose([rate(t) for t in (50, 79, 84, 99)], [1, 1, 1 - 0.9 * 0.5, 0.1], rtol=1e-5)


def one_update(config, windows=None):
    """The parameters before and after, as float64, and the metrics."""
    state = make_state(config)
    before = jax.tree.map(lambda x: np.asarray(x, np.float64), state.params)
    after, metrics = make_train_step(config)(state, batch() if windows is None else windows)
    return before, jax.tree.map(lambda x: np.asarray(x, np.float64), after.params), metrics


def assert_same_but_for_the_last_bit(a, b):
    """Programs may round differently: parameters, and updates of up to 0.01, whose last bit is 1e-9."""
    np.testing.assert_allclose(a, b, rtol=5e-7, atol=1e-9)


def test_the_mixer_has_its_own_learning_rate_and_weight_decay(tmp_path):
    # Adam's first step is as long as the learning rate, wherever there is a gradient.
    config = with_optimizer(tiny(tmp_path), learning_rate=0.01, weight_decay=0.0, warmup_steps=0)
    _, plain, _ = one_update(config)
    before, slower, _ = one_update(with_optimizer(config, mixer_learning_rate=0.1, mixer_weight_decay=0.5))
    moved, moved_slower, start = (parts_of(tree) for tree in (plain, slower, before))
    for a, b in zip(moved["blocks"], moved_slower["blocks"], strict=True):
        assert_same_but_for_the_last_bit(a, b)
    flags = parts_of(decays(before, model_declarations(config.model, config.mixer)))["mixer"]
    for a, b, x, decayed in zip(moved["mixer"], moved_slower["mixer"], start["mixer"], flags, strict=True):
        # Parameters of size 4 are float32 numbers 5e-7 apart.
        np.testing.assert_allclose(b - x, 0.1 * (a - x) - 0.1 * 0.01 * 0.5 * x * decayed, atol=5e-7)


def test_muon_makes_stacked_matrices_orthogonal(tmp_path):
    config = with_optimizer(
        without_memory(tiny(tmp_path)), name=OptimizerName.MUON, learning_rate=0.01, weight_decay=0.0
    )
    before, after, _ = one_update(config)
    start, end = (tree["blocks"]["attention"]["function"]["query"]["kernel"] for tree in (before, after))
    kernels = end - start
    assert kernels.shape == (2, 16, 16)
    for kernel in kernels:  # a matrix for each block; Newton-Schulz gets the singular values to between 0.3 and 1.4
        values = np.linalg.svd(kernel, compute_uv=False) / (0.005 * 0.2 * 16**0.5)
        assert values.min() > 0.3
        assert values.max() < 1.4
    adamw = one_update(with_optimizer(config, name=OptimizerName.ADAMW))[1]
    for module, name in (("embed", "embedding"), ("norm", "scale")):
        assert_same_but_for_the_last_bit(after[module][name], adamw[module][name])


def test_z_loss_is_the_squared_log_normaliser(tmp_path):
    config = without_memory(tiny(tmp_path))
    _, _, metrics = one_update(config)
    _, _, with_z = one_update(with_optimizer(config, z_loss=0.1))
    assert float(metrics.loss) == float(with_z.loss)  # the logged loss does not include it
    assert float(with_z.grad_norm) != float(metrics.grad_norm)
    graph, params = model_graph(config.model, config.mixer), make_state(config).params
    tokens = jnp.asarray(batch().tokens)

    def objective(params):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(normaliser - picked + 0.1 * normaliser**2)

    norm = float(optax.tree.norm(jax.jit(jax.grad(objective))(params)))
    assert float(with_z.grad_norm) == pytest.approx(norm, rel=1e-4)


def test_the_first_token_of_a_document_is_not_a_target(tmp_path):
    config = without_memory(tiny(tmp_path))
    tokens = batch(4).tokens
    segments = np.where(np.arange(17) < 6, 1, 2)[None].repeat(4, axis=0).astype(np.int32)
    _, _, metrics = one_update(config, Batch(tokens, segments))
    model = nnx.merge(model_graph(config.model, config.mixer), make_state(config).params)
    alone = [model.token_losses(jnp.asarray(part[:, :-1]), jnp.asarray(part[:, 1:])).cross_entropy for part in
             (tokens[:, :6], tokens[:, 6:])]  # fmt: skip
    expected = np.concatenate([np.asarray(losses).ravel() for losses in alone]).mean()
    assert float(metrics.loss) == pytest.approx(float(expected), rel=1e-5)
    parts = with_train(config, accumulation=2)  # parts with different numbers of targets
    segments[0] = 1
    whole, split = (one_update(each, Batch(tokens, segments))[2] for each in (config, parts))
    np.testing.assert_allclose(whole[:2], split[:2], rtol=1e-5)


def test_a_batch_without_targets_changes_only_the_step(tmp_path):
    config = without_memory(tiny(tmp_path))
    segments = np.arange(17, dtype=np.int32)[None].repeat(4, axis=0)  # documents of one token
    state, step = make_state(config), make_train_step(config)
    before = jax.tree.map(np.asarray, state)
    after, metrics = step(state, Batch(batch().tokens, segments))
    assert np.isnan(metrics.loss)
    assert not metrics.skipped
    assert_same_bits(after, before._replace(step=np.int32(1)))


def test_a_spike_is_skipped():
    losses, rng = LossRecord.empty(), np.random.default_rng(0)
    past = 2 + 0.1 * rng.normal(size=300)
    for number, loss in enumerate(past):
        losses = record_loss(losses, jnp.float32(loss))
        if number + 1 < MIN_LOSSES:
            assert not is_spike(losses, jnp.float32(100.0), 6.0)
    assert float(losses.mean) == pytest.approx(2, abs=0.03)
    assert float(losses.variance) ** 0.5 == pytest.approx(0.1, rel=0.3)
    assert bool(is_spike(losses, jnp.float32(2.9), 6.0))
    assert not is_spike(losses, jnp.float32(2.3), 6.0)
    assert not is_spike(losses, jnp.float32(100.0), None)


def test_fingerprints_detect_changes():
    tree = {"a": jnp.arange(12.0).reshape(3, 4), "b": jnp.asarray([1, 2, 3])}
    first = np.asarray(fingerprint(tree))
    for index in range(12):
        changed = {**tree, "a": tree["a"].at[index // 4, index % 4].add(1e-6 if index else 1e-30)}
        assert np.asarray(fingerprint(changed))[0] != first[0]
    swapped = {**tree, "b": tree["b"][::-1]}
    assert np.asarray(fingerprint(swapped))[1] != first[1]


def test_a_fingerprint_in_parts_is_that_of_the_whole(rng, monkeypatch):
    tree = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((5, 3, 2), (7, 4), (3,), ())]
    whole = fingerprint(tree)
    monkeypatch.setattr(fingerprints, "PART_SIZE", 8)
    np.testing.assert_array_equal(fingerprint(tree), whole)
