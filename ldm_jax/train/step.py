"""One update, as a pure function of the training state and a batch."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from ldm_jax.config import Config
from ldm_jax.data import Batch
from ldm_jax.nn import Params, init_params, model_declarations, model_graph, parts_of, target_weights
from ldm_jax.parameters import shardings
from ldm_jax.train.optimizer import learning_rate_schedule, make_optimizer
from ldm_jax.train.spikes import LossRecord, is_spike, record
from ldm_jax.typing import Scalar


class Skips(NamedTuple):
    """Updates that were not made, because loss or gradient were not finite, or the loss a spike."""

    total: Int[Array, ""]
    in_a_row: Int[Array, ""]


class TrainState(NamedTuple):
    """All that an update changes; a pytree of arrays."""

    step: Int[Array, ""]
    """Batches seen."""
    params: Params
    """Nested dictionaries of float32 arrays."""
    optimizer: optax.OptState
    skips: Skips
    losses: LossRecord
    average: Params | None
    """Running mean of the parameters, if `optimizer.ema` asks for one."""

    @property
    def trained(self) -> Params:
        """The parameters to use: their running mean if there is one."""
        return self.params if self.average is None else self.average


class StepMetrics(NamedTuple):
    """What an update tells of itself."""

    loss: Scalar
    """Cross-entropy of the batch, before the update; nats a token."""
    grad_norm: Scalar
    """Length of the gradient, before clipping."""
    grad_norms: dict[str, Scalar]
    """The same by part: embedding, blocks, and the mixer if it learns anything."""
    update_ratio: Scalar
    """Length of the update over that of the parameters."""
    learning_rate: Scalar
    skipped: Bool[Array, ""]
    """Whether the update was not made."""
    skips: Skips
    """So far."""


def make_state(config: Config, mesh: Mesh | None = None) -> TrainState:
    """The state before the first update; with a mesh every device makes its own part of it."""
    if mesh is None:
        return _make_state(config)
    places = shardings(state_shapes(config), mesh, model_declarations(config.model, config.mixer))
    return jax.jit(lambda: _make_state(config), out_shardings=places)()


def state_shapes(config: Config) -> TrainState:
    """Shapes and types of a state's arrays, without the arrays."""
    return jax.eval_shape(lambda: _make_state(config))


def _make_state(config: Config) -> TrainState:
    params = init_params(config.model, config.mixer, config.train.seed)
    average = jax.tree.map(jnp.copy, params) if config.optimizer.ema > 0 else None
    zero = jnp.zeros((), jnp.int32)
    counters = zero, Skips(zero, zero), LossRecord.empty()
    # Copies: an update uses its state up, and the same array cannot be used up twice.
    step, skips, losses = jax.tree.map(jnp.copy, counters)
    return TrainState(step, params, _optimizer(config).init(params), skips, losses, average)


def _optimizer(config: Config) -> optax.GradientTransformation:
    return make_optimizer(config.optimizer, model_declarations(config.model, config.mixer))


def make_train_step(
    config: Config, mesh: Mesh | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The compiled update `(state, batch) -> (state, metrics)`; the state given is used up.

    With a mesh, which `jax.set_mesh` has to have set, the state stays where `make_state` put it.

    With `accumulation` A the batch is computed in A parts, one after the other; loss and gradient are the batch's. Of
    windows of several documents, the targets that open a new one do not count.
    """
    graph, optimizer = model_graph(config.model, config.mixer), _optimizer(config)
    rate_at = learning_rate_schedule(config.optimizer, config.train.steps)

    def part_loss(params: Params, part: Batch, targets: Scalar) -> tuple[Scalar, Scalar]:
        """What is minimised, and the cross-entropy; both as the part's share of the batch's mean."""
        tokens, segments = _arrays(part)
        inside = None if segments is None else segments[:, :-1]
        losses = nnx.merge(graph, params).token_losses(tokens[:, :-1], tokens[:, 1:], inside)
        counted = target_weights(tokens, segments)
        cross_entropy = jnp.sum(counted * losses.cross_entropy) / targets
        z_loss = jnp.sum(counted * losses.log_normaliser**2) / targets
        return cross_entropy + config.optimizer.z_loss * z_loss, cross_entropy

    def loss_and_grads(params: Params, batch: Batch) -> tuple[Scalar, Params]:
        value_and_grad = jax.value_and_grad(part_loss, has_aux=True)
        targets = jnp.sum(target_weights(*_arrays(batch)))
        parts = config.train.accumulation
        if parts == 1:
            (_, loss), grads = value_and_grad(params, batch, targets)
            return loss, grads

        def add(total: tuple[Scalar, Params], part: Batch) -> tuple[tuple[Scalar, Params], None]:
            (_, loss), grads = value_and_grad(params, part, targets)
            return jax.tree.map(jnp.add, total, (loss, grads)), None

        zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
        return jax.lax.scan(add, zeros, split)[0]

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        loss, grads = loss_and_grads(state.params, batch)
        norms = {part: optax.tree.norm(leaves) for part, leaves in parts_of(grads).items() if leaves}
        norm = optax.tree.norm(norms)
        skipped = ~(jnp.isfinite(loss) & jnp.isfinite(norm)) | is_spike(
            state.losses, loss, config.train.spike_deviations
        )
        rate = jnp.asarray(rate_at(state.step), jnp.float32)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        updates = jax.tree.map(lambda update: rate * update, updates)
        params = optax.apply_updates(state.params, updates)
        after = TrainState(
            state.step,
            params,
            optimizer_state,
            Skips(state.skips.total, jnp.zeros_like(state.skips.in_a_row)),
            record(state.losses, loss),
            None if state.average is None else _averaged(state.average, params, config.optimizer.ema, state.step),
        )
        before = state._replace(skips=Skips(state.skips.total + 1, state.skips.in_a_row + 1))
        kept = jax.tree.map(lambda old, new: jnp.where(skipped, old, new), before, after)
        ratio = jnp.where(skipped, 0.0, optax.tree.norm(updates) / optax.tree.norm(state.params))
        metrics = StepMetrics(loss, norm, norms, ratio, rate, skipped, kept.skips)
        return kept._replace(step=state.step + 1), metrics

    if mesh is None:
        return jax.jit(train_step, donate_argnums=0)
    places = shardings(state_shapes(config), mesh, model_declarations(config.model, config.mixer))
    return jax.jit(train_step, donate_argnums=0, out_shardings=(places, None))


def _arrays(batch: Batch) -> tuple[Int[Array, "B T_and_next"], Int[Array, "B T_and_next"] | None]:
    return jnp.asarray(batch.tokens), None if batch.segments is None else jnp.asarray(batch.segments)


def _averaged(average: Params, params: Params, decay: float, step: Int[Array, ""]) -> Params:
    # The first steps forget faster: the parameters at the start should not be remembered.
    kept = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda old, new: kept * old + (1 - kept) * new, average, params)
