"""One update, as a pure function of the training state and a batch."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int

from ldm_jax.config import Config
from ldm_jax.nn import Params, init_params, model_graph
from ldm_jax.train.optimizer import learning_rate_schedule, make_optimizer
from ldm_jax.typing import Scalar


class TrainState(NamedTuple):
    """All that an update changes; a pytree of arrays."""

    step: Int[Array, ""]
    """Updates made."""
    params: Params
    """Nested dictionaries of float32 arrays."""
    optimizer: optax.OptState


class StepMetrics(NamedTuple):
    """What an update tells of itself."""

    loss: Scalar
    """Of the batch, before the update; nats per token."""
    grad_norm: Scalar
    """Length of the gradient, before clipping."""
    learning_rate: Scalar


def make_state(config: Config) -> TrainState:
    """The state before the first update."""
    params = init_params(config.model, config.mixer, config.train.seed)
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(config.train).init(params))


def make_train_step(
    config: Config,
) -> Callable[[TrainState, Int[Array, "B T_and_next"]], tuple[TrainState, StepMetrics]]:
    """The compiled update `(state, batch) -> (state, metrics)`; the state given is used up.

    With `accumulation` A the batch is computed in A parts, one after the other; loss and gradient are the batch's.
    """
    graph, optimizer = model_graph(config.model, config.mixer), make_optimizer(config.train)
    rate = learning_rate_schedule(config.train)

    def loss_of(params: Params, windows: Int[Array, "b T_and_next"]) -> Scalar:
        return nnx.merge(graph, params).loss(windows[:, :-1], windows[:, 1:])

    def add_part(
        total: tuple[Scalar, Params], windows: Int[Array, "b T_and_next"], params: Params
    ) -> tuple[tuple[Scalar, Params], None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, windows)), None

    def train_step(state: TrainState, batch: Int[Array, "B T_and_next"]) -> tuple[TrainState, StepMetrics]:
        parts = config.train.accumulation
        if parts == 1:
            loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
        else:
            zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, state.params)
            total, _ = jax.lax.scan(
                lambda total, part: add_part(total, part, state.params), zeros, batch.reshape(parts, -1, batch.shape[1])
            )
            loss, grads = jax.tree.map(lambda x: x / parts, total)
        metrics = StepMetrics(loss, optax.tree.norm(grads), jnp.asarray(rate(state.step), jnp.float32))
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return jax.jit(train_step, donate_argnums=0)
