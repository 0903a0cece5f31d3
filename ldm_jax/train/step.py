"""The training step: a pure function of the training state and a batch."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from ldm_jax.config import Config, TrainedPart
from ldm_jax.data import Batch
from ldm_jax.nn import (
    Params,
    init_params,
    model_declarations,
    model_graph,
    parts_of,
    replace_params,
    split_mixer,
    target_weights,
)
from ldm_jax.parameters import shardings
from ldm_jax.runs.state import LossRecord, Skips, TrainState
from ldm_jax.train.optimizer import learning_rate_schedule, make_optimizer
from ldm_jax.typing import Scalar

LOSS_DECAY = 0.99
"""Decay of the running mean of losses, which then spans about 100 steps."""
MIN_LOSSES = 100
"""Losses before any is called a spike, because the first ones fall fast."""


def record_loss(past: LossRecord, loss: Scalar) -> LossRecord:
    """Adds a loss to the record, by West's update of an exponentially weighted variance."""
    decay = jnp.minimum(LOSS_DECAY, past.losses / (past.losses + 1))  # a plain mean at first
    difference = loss - past.mean
    mean = past.mean + (1 - decay) * difference
    variance = decay * (past.variance + (1 - decay) * difference**2)
    return LossRecord(mean, variance, past.losses + 1)


def is_spike(past: LossRecord, loss: Scalar, deviations: float | None) -> Bool[Array, ""]:
    """Whether the loss is more than `deviations` standard deviations above the mean. None: never."""
    if deviations is None:
        return jnp.zeros((), bool)
    bound = past.mean + deviations * jnp.sqrt(past.variance)
    return (past.losses >= MIN_LOSSES) & (loss > bound)


class StepMetrics(NamedTuple):
    """Metrics of a training step."""

    loss: Scalar
    """Cross-entropy of the batch before the update, in nats per token; NaN if the batch has no target."""
    grad_norm: Scalar
    """Global norm of the gradient before clipping."""
    grad_norms: dict[str, Scalar]
    """The norm by part: embedding, blocks, and mixer if it has parameters."""
    update_ratio: Scalar
    """Norm of the update over the norm of the trained parameters."""
    learning_rate: Scalar
    skipped: Bool[Array, ""]
    skips: Skips


def make_state(config: Config, mesh: Mesh | None = None, given: Params | None = None) -> TrainState:
    """The state before the first step; with a mesh, every device initialises its own shards.

    Args:
        config: model, optimiser and seed.
        mesh: None for one device.
        given: parameters that replace the initial ones of the same path. They are donated.
    """
    if mesh is None and given is None:
        return _make_state(config, {})
    places = None
    if mesh is not None:
        places = shardings(state_shapes(config), mesh, model_declarations(config.model, config.mixer))
    # Compiled, so that initial parameters which are replaced are never computed.
    return jax.jit(lambda given: _make_state(config, given), out_shardings=places, donate_argnums=0)(given or {})


def state_shapes(config: Config) -> TrainState:
    """The state as `jax.ShapeDtypeStruct`s."""
    return jax.eval_shape(lambda: _make_state(config, {}))


def _make_state(config: Config, given: Params) -> TrainState:
    params = replace_params(init_params(config.model, config.mixer, config.train.seed), given)
    trained, _ = _split(config, params)
    average = jax.tree.map(jnp.copy, trained) if config.optimizer.ema > 0 else None
    zero = jnp.zeros((), jnp.int32)
    counters = zero, Skips(zero, zero), LossRecord.empty()
    # Copies, because the step donates its state and an array cannot be donated twice.
    step, skips, losses = jax.tree.map(jnp.copy, counters)
    state = TrainState(step, params, _optimizer(config).init(trained), skips, losses, average)
    return jax.tree.map(_at_most_32_bits, state)  # Muon's constants are float64 in 64-bit mode


def _at_most_32_bits(x: Array) -> Array:
    return x.astype(jnp.float32) if x.dtype == jnp.float64 else x


def _split(config: Config, params: Params) -> tuple[Params, Params]:
    """The trained parameters and the frozen ones."""
    return split_mixer(params) if config.optimizer.train is TrainedPart.MIXER else (params, {})


def _optimizer(config: Config) -> optax.GradientTransformation:
    return make_optimizer(config.optimizer, model_declarations(config.model, config.mixer))


def make_train_step(
    config: Config, mesh: Mesh | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The compiled training step `(state, batch) -> (state, metrics)`, which donates the state.

    With `train.accumulation` A, the batch is processed in A parts, one after the other; loss and gradient are those of
    the whole batch. In windows of several documents, the first token of a document is not a target. A batch without
    targets changes nothing but the number of the step. Frozen parameters have no gradient, and do not change.

    Args:
        config: model, optimiser and batch.
        mesh: None for one device. Else the caller also sets it by `jax.set_mesh`, and the state keeps the sharding that
            `make_state` gave it.
    """
    graph, optimizer = model_graph(config.model, config.mixer), _optimizer(config)
    rate_at = learning_rate_schedule(config.optimizer, config.train.steps)

    def part_loss(trained: Params, frozen: Params, part: Batch, targets: Scalar) -> tuple[Scalar, Scalar]:
        """The objective and the cross-entropy, both as the part's share of the mean over the batch."""
        tokens, segments = _arrays(part)
        inside = None if segments is None else segments[:, :-1]
        losses = nnx.merge(graph, replace_params(frozen, trained)).token_losses(tokens[:, :-1], tokens[:, 1:], inside)
        counted = target_weights(tokens, segments)
        cross_entropy = jnp.sum(counted * losses.cross_entropy) / targets
        z_loss = jnp.sum(counted * losses.log_normaliser**2) / targets
        return cross_entropy + config.optimizer.z_loss * z_loss, cross_entropy

    def loss_and_grads(trained: Params, frozen: Params, batch: Batch, targets: Scalar) -> tuple[Scalar, Params]:
        value_and_grad = jax.value_and_grad(part_loss, has_aux=True)
        parts = config.train.accumulation
        if parts == 1:
            (_, loss), grads = value_and_grad(trained, frozen, batch, targets)
            return loss, grads

        def add(total: tuple[Scalar, Params], part: Batch) -> tuple[tuple[Scalar, Params], None]:
            (_, loss), grads = value_and_grad(trained, frozen, part, targets)
            return jax.tree.map(jnp.add, total, (loss, grads)), None

        zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, trained)
        split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
        return jax.lax.scan(add, zeros, split)[0]

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        targets = jnp.sum(target_weights(*_arrays(batch)))
        empty = targets == 0
        trained, frozen = _split(config, state.params)
        loss, grads = loss_and_grads(trained, frozen, batch, jnp.maximum(targets, 1))
        norms = {part: optax.tree.norm(leaves) for part, leaves in parts_of(grads).items() if leaves}
        norm = optax.tree.norm(norms)
        skipped = ~(jnp.isfinite(loss) & jnp.isfinite(norm)) | is_spike(
            state.losses, loss, config.train.spike_deviations
        )
        rate = jnp.asarray(rate_at(state.step), jnp.float32)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, trained)
        updates = jax.tree.map(lambda update: rate * update, updates)
        new = optax.apply_updates(trained, updates)
        after = TrainState(
            state.step,
            replace_params(frozen, new),
            optimizer_state,
            Skips(state.skips.total, jnp.zeros_like(state.skips.in_a_row)),
            record_loss(state.losses, loss),
            None if state.average is None else _moving_average(state.average, new, config.optimizer.ema, state.step),
        )
        counted = skipped.astype(jnp.int32)
        before = state._replace(skips=jax.tree.map(lambda count: count + counted, state.skips))
        kept = jax.tree.map(lambda old, new: jnp.where(skipped | empty, old, new.astype(old.dtype)), before, after)
        ratio = jnp.where(skipped | empty, 0.0, optax.tree.norm(updates) / optax.tree.norm(trained))
        metrics = StepMetrics(jnp.where(empty, jnp.nan, loss), norm, norms, ratio, rate, skipped, kept.skips)
        return kept._replace(step=state.step + 1), metrics

    if mesh is None:
        return jax.jit(train_step, donate_argnums=0)
    places = shardings(state_shapes(config), mesh, model_declarations(config.model, config.mixer))
    return jax.jit(train_step, donate_argnums=0, out_shardings=(places, None))


def _arrays(batch: Batch) -> tuple[Int[Array, "B T_and_next"], Int[Array, "B T_and_next"] | None]:
    return jnp.asarray(batch.tokens), None if batch.segments is None else jnp.asarray(batch.segments)


def _moving_average(average: Params, params: Params, decay: float, step: Int[Array, ""]) -> Params:
    decay_now = jnp.minimum(decay, (1 + step) / (10 + step))  # less at first, to forget the initial parameters
    return jax.tree.map(lambda old, new: decay_now * old + (1 - decay_now) * new, average, params)
