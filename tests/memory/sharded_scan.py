"""Run by test_depth_scan.py in a separate process with eight devices: sharded tokens have the same gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ldm_jax import Backward, Observation, depth_scan, init_state, rls_apply, rls_correction, rls_read, rls_undo

DEPTH, TOKENS, VALUE, KEY = 6, 16, 3, 4


def step(layer, state):
    def one(layer, stream, memory, inverse_covariance):
        query, observation = layer
        output = jnp.tanh(stream + rls_read(memory, query)) + observation.value
        observation = observation._replace(value=output)
        correction = rls_correction(memory, inverse_covariance, observation)
        return (stream + output, *rls_apply(memory, inverse_covariance, correction, observation)), (stream, correction)

    return jax.vmap(one, in_axes=(None, 0, 0, 0))(layer, *state)


def undo(layer, state, residual):
    def one(layer, memory, inverse_covariance, correction):
        return rls_undo(memory, inverse_covariance, correction, layer[1])

    stream, correction = residual
    return (stream, *jax.vmap(one, in_axes=(None, 0, 0, 0))(layer, *state[1:], correction))


def loss(layers, state, backward):
    return jnp.sum(jnp.sin(depth_scan(step, state, layers, backward=Backward(backward), undo=undo)[0]))


def main() -> None:
    assert jax.device_count() == 8
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    observations = Observation(normal(DEPTH, KEY), normal(DEPTH, VALUE), jnp.full(DEPTH, 0.9), jnp.ones(DEPTH))
    layers = normal(DEPTH, KEY), observations
    state = normal(TOKENS, VALUE), *(jnp.stack([part] * TOKENS) for part in init_state(VALUE, KEY, 1.0))
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    expected = gradient(layers, state, "stored")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(state, NamedSharding(mesh, PartitionSpec("data")))
    actual = gradient(layers, sharded, "reversible")
    assert len(actual[1][0].sharding.device_set) == 8
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # Sums over 16 tokens in another order, and states that `undo` restores up to rounding: 200 roundings of 1e-7.
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.abs(b).max()))


if __name__ == "__main__":
    main()
