"""float32 gradients of the carried state, whose forgetting is folded into importance, at depths where it is rebased."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import every_state, random_observations
from ldm_jax import init_state, rls_read, rls_write
from ldm_jax.memory.dual import Dual
from ldm_jax.memory.fused import Fused
from ldm_jax.memory.recurrent import MemoryShape, Recurrent
from ldm_jax.memory.write import SMALLEST_DISCOUNT
from ldm_jax.memory.writes import Write

VALUE, ALPHA = 3, 10.0
FORMS = {
    "recurrent": lambda write, key_dim, depth: Recurrent(write.rule, MemoryShape(1, VALUE, key_dim)),
    "dual": lambda write, key_dim, depth: Dual(write.rule, MemoryShape(1, VALUE, key_dim), depth),
    "fused": lambda write, key_dim, depth: Fused(write.rule, MemoryShape(1, VALUE, key_dim)),
}


def read_all(form, alpha, observations, queries):
    """The reads before every write, of one token and one group, carried by a scan."""
    with_axes = jax.tree.map(lambda x: x[:, None, None], (observations, queries))

    def step(state, layer):
        observation, query = layer
        values, state = form.read(state, query)
        return form.write(state, observation)[0], values[0, 0]

    return jax.lax.scan(step, form.start((1,), alpha), with_axes)[1]


def expected_reads(alpha, observations, queries):
    """The same by the public write, in the type of the observations."""
    start = init_state(VALUE, observations.key.shape[1], alpha, observations.key.dtype)
    memories, _ = every_state(rls_write, start, observations)
    before = jnp.concatenate([start[0][None], memories[:-1]])
    return jax.vmap(rls_read)(before, queries)


@pytest.mark.parametrize(
    ("write", "name", "depth", "key_dim", "forgetting"),
    [
        (Write.RLS, "recurrent", 96, 4, 0.5),
        (Write.RLS, "dual", 96, 8, 0.7),
        (Write.RLS, "dual", 400, 4, 0.9),
        (Write.RLS, "fused", 96, 4, 0.5),
        (Write.SQRT_RLS, "dual", 96, 4, 0.5),
    ],
)
def test_gradients_where_the_discount_is_rebased(rng, write, name, depth, key_dim, forgetting):
    assert forgetting**depth < SMALLEST_DISCOUNT
    observations = random_observations(rng, depth, VALUE, key_dim, forgetting=forgetting, importance=(0.5, 2.0))
    queries = rng.normal(size=(depth, key_dim)).astype(np.float32)
    weights = rng.normal(size=(depth, VALUE)).astype(np.float32)

    def gradients(reads, dtype):
        loss = lambda *arguments: jnp.sum(weights.astype(dtype) * jnp.sin(reads(*arguments)))  # noqa: E731
        arguments = jax.tree.map(lambda x: jnp.asarray(x, dtype), (ALPHA, observations, queries))
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arguments)

    form = FORMS[name](write, key_dim, depth)
    found = gradients(lambda *arguments: read_all(form, *arguments), jnp.float32)
    with jax.enable_x64(True):
        expected = jax.tree.map(np.asarray, gradients(expected_reads, jnp.float64))
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.float32
        # Rounding of 6e-8, magnified by the condition of P: with lambda .5 it holds two or three keys only.
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-4 * scale)
