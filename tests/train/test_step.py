"""The update against AdamW written out, the rate by step, and batches in parts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldm_jax.config import Schedule, TrainConfig
from ldm_jax.nn import model_graph
from ldm_jax.train import make_state, make_train_step
from ldm_jax.train.optimizer import learning_rate_schedule, matrices
from runs import tiny, with_train, without_memory


def batch(size=4):
    return jax.random.randint(jax.random.key(0), (size, 17), 0, 256, jnp.int32)


def test_one_update_is_adamw(tmp_path):
    config = with_train(without_memory(tiny(tmp_path)), clip_norm=0.5, weight_decay=0.3, learning_rate=0.01)
    state = make_state(config)
    params = jax.tree.map(np.asarray, state.params)
    graph = model_graph(config.model, config.mixer)
    windows = batch()
    loss_of = jax.jit(jax.value_and_grad(lambda p: nnx.merge(graph, p).loss(windows[:, :-1], windows[:, 1:])))
    loss, grads = loss_of(state.params)
    norm = float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(grads))))
    assert norm > 0.5  # so that the clip is at work
    after, metrics = make_train_step(config)(state, windows)
    assert float(metrics.loss) == pytest.approx(float(loss), rel=1e-6)
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert float(metrics.learning_rate) == pytest.approx(0.005)  # the first of two steps of warm-up

    def updated(param, grad, is_matrix):
        # Adam's first step: mean / (sqrt(mean square) + 1e-8), both corrected for their start at zero
        grad = np.asarray(grad, np.float64) * 0.5 / norm
        return param - 0.005 * (grad / (np.abs(grad) + 1e-8) + 0.3 * is_matrix * param)

    expected = jax.tree.map(updated, params, grads, matrices(params))
    for got, want, grad in zip(*(jax.tree.leaves(tree) for tree in (after.params, expected, grads)), strict=True):
        clear = np.abs(grad) > 1e-5  # where the sign of a gradient is rounding, Adam's first step is, too
        np.testing.assert_allclose(np.where(clear, got, 0), np.where(clear, want, 0), atol=2e-5)


def test_only_matrices_decay(tmp_path):
    params = make_state(tiny(tmp_path)).params
    decayed = matrices(params)
    for (path, leaf), flag in zip(
        jax.tree_util.tree_flatten_with_path(params)[0], jax.tree.leaves(decayed), strict=True
    ):
        stacked = path[0].key == "blocks"
        assert flag == (leaf.ndim - stacked >= 2), path


def test_a_batch_in_parts_is_the_batch(tmp_path):
    config = without_memory(tiny(tmp_path))
    parts = with_train(config, accumulation=2)
    # Two steps: Adam's first is only signs. Sums in another order differ by rounding, which Adam divides by a small
    # root; so the losses and the gradient's norm are compared tightly, the parameters by what a rate of .003 allows.
    results = []
    for each in (config, parts):
        state, step = make_state(each), make_train_step(each)
        state, first = step(state, batch())
        state, second = step(state, batch())
        results.append((first, second, state))
    for a, b in zip(results[0][:2], results[1][:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)
    for a, b in zip(*(jax.tree.leaves(result[2].params) for result in results), strict=True):
        assert float(jnp.mean(jnp.abs(a - b))) < 1e-5


def test_state_types(tmp_path):
    from ldm_jax.config import ComputeType

    config = tiny(tmp_path)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype=ComputeType.BFLOAT16))
    state, _ = jax.eval_shape(make_train_step(config), jax.eval_shape(lambda: make_state(config)), batch())
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}


def test_rate_by_step():
    cosine = learning_rate_schedule(TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0))
    np.testing.assert_allclose([cosine(t) for t in (0, 4, 9, 10)], [0.1, 0.5, 1.0, 1.0], rtol=1e-5)
    np.testing.assert_allclose(cosine(55), 0.1 + 0.9 * 0.5, rtol=1e-5)  # halfway down
    np.testing.assert_allclose(cosine(100), 0.1, rtol=1e-5)
    constant = learning_rate_schedule(
        TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0, schedule=Schedule.CONSTANT, final_learning_rate=0.0)
    )
    np.testing.assert_allclose([constant(t) for t in (0, 9, 50, 80, 90, 100)], [0.1, 1, 1, 1, 0.5, 0], atol=1e-6)

    crowded = learning_rate_schedule(  # a decay that would begin before the warm-up's end begins there
        TrainConfig(steps=100, warmup_steps=50, learning_rate=1.0, schedule=Schedule.CONSTANT, decay_fraction=0.8)
    )
    np.testing.assert_allclose([crowded(t) for t in (49, 75, 100)], [1.0, 0.55, 0.1], atol=1e-6)


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 50), (3, 3), (10, 0)])
def test_short_runs_have_a_positive_rate(schedule, steps, warmup):
    rate = learning_rate_schedule(TrainConfig(steps=steps, warmup_steps=warmup, schedule=schedule, learning_rate=1.0))
    assert all(0 < float(rate(t)) <= 1 + 1e-6 for t in range(steps))
