"""A write and the next read in one pass over the memory.

On an accelerator a depth memory costs what it moves: `M` is K times as wide as the stream. Written and then read by two
operations it is moved three times; here twice, and in the backward pass three times.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.memory.fused_kernel import pull_kernel, undo_kernel, write_read_kernel
from ldm_jax.memory.observation import Observation
from ldm_jax.memory.recurrent import Alpha, MemoryShape, observe_keys, over_tokens, start_covariance
from ldm_jax.memory.write import Covariance, Gain, WriteRule
from ldm_jax.typing import DType


def write_read(
    memory: Float[Array, "K *tokens D"],
    key: Float[Array, "*tokens G K"],
    gain: Float[Array, "*tokens G K"],
    value: Float[Array, "*tokens D"],
    query: Float[Array, "*tokens G K"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "K *tokens D"], Float[Array, "*tokens D"], Float[Array, "*tokens D"]]:
    """A rank-one write, then a read, of every token and group:

        e = v - M k,    M <- M + e g',    y = M q

    With `g = (beta/s) P k` it is the RLS write. Compiled for a TPU it is one kernel; elsewhere plain JAX with the same
    numbers. The compiler does not split the kernel over devices: shard tokens and groups by `jax.shard_map`, with
    `check_vma=False`. It has no forward mode and no second derivative.

    Args:
        memory: `M` of all groups side by side, K first, so that the widest axis is the last.
        key: `k`; cast to the memory's type, as gain and query.
        gain: `g`.
        value: `v` of all groups side by side, in any floating type.
        query: `q`.
        interpret: run the kernel on any machine, slowly, as Pallas interprets it.

    Returns:
        The memory; the error `e`, in the memory's type, with no gradient of its own; the readout `y`, in the value's
        type.

    Raises:
        ValueError: shapes that do not belong together.
        TypeError: a value that is not floating.
    """
    _check(memory, value, key=key, gain=gain, query=query)
    key, gain, query = (keys.astype(memory.dtype) for keys in (key, gain, query))
    if not memory.size:
        return memory, value.astype(memory.dtype), jnp.zeros_like(value)
    m, v = memory.reshape(len(memory), -1, memory.shape[-1]), value.reshape(-1, value.shape[-1])
    results = _write_read(m, _by_group(key), _by_group(gain), v, _by_group(query), interpret)
    after, error, readout = cast(tuple[Array, ...], results)
    return after.reshape(memory.shape), error.reshape(value.shape), readout.reshape(value.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _write_read(m: Array, key: Array, gain: Array, value: Array, query: Array, interpret: bool) -> tuple[Array, ...]:
    """Of M `[K, tokens, D]`, keys `[G, K, tokens]` and values `[tokens, D]`."""
    return _choose(write_read_kernel, _write_read_plain, interpret)(m, key, gain, value, query)


def _forward(m: Array, key: Array, gain: Array, value: Array, query: Array, interpret: bool) -> tuple[Any, Any]:
    # Not into M's own place: M is still needed, so the compiler would copy it first.
    kernel = functools.partial(write_read_kernel, in_place=False)
    after, error, readout = _choose(kernel, _write_read_plain, interpret)(m, key, gain, value, query)
    return (after, error, readout), (m, key, gain, query, error)


def _pull_back(interpret: bool, saved: tuple[Array, ...], cotangent: tuple[Array, ...]) -> tuple[Array, ...]:
    of_after, _, of_readout = cotangent
    return _choose(pull_kernel, _pull_plain, interpret)(*saved, of_after, of_readout)


_write_read.defvjp(_forward, _pull_back)


def _choose(kernel: Callable[..., Any], plain: Callable[..., Any], interpret: bool) -> Callable[..., Any]:
    if interpret:
        return functools.partial(kernel, interpret=True)
    return functools.partial(jax.lax.platform_dependent, tpu=kernel, default=plain)


def undo_write(
    memory: Float[Array, "K *tokens D"],
    key: Float[Array, "*tokens G K"],
    gain: Float[Array, "*tokens G K"],
    error: Float[Array, "*tokens D"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "K *tokens D"], Float[Array, "*tokens D"]]:
    """What `write_read` was given, from what it returned: `M <- M - e g'`, and the value `v = e + M k`.

    Arguments and errors as there. No derivative.
    """
    _check(memory, error, key=key, gain=gain)
    key, gain, error = (array.astype(memory.dtype) for array in (key, gain, error))
    if not memory.size:
        return memory, error
    m, e = memory.reshape(len(memory), -1, memory.shape[-1]), error.reshape(-1, error.shape[-1])
    before, value = _choose(undo_kernel, _undo_plain, interpret)(m, _by_group(key), _by_group(gain), e)
    return before.reshape(memory.shape), value.reshape(error.shape)


def _check(memory: Array, value: Array, **all_keys: Array) -> None:
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"the value is {value.dtype}, but it must be floating.")
    if memory.shape[1:] != value.shape or memory.ndim < 2:
        raise ValueError(
            f"the memory has shape {memory.shape} and the value {value.shape}, but they must be [K, *tokens, D] and "
            "[*tokens, D]."
        )
    key_dim, *tokens, width = memory.shape
    for name, keys in all_keys.items():
        groups = keys.shape[-2] if keys.ndim > 1 else 0
        if keys.shape != (*tokens, groups, key_dim) or keys.shape != all_keys["key"].shape or width % max(groups, 1):
            raise ValueError(
                f"the {name} has shape {keys.shape}, but for a memory of shape {memory.shape} it must be "
                f"[*tokens, G, K] with tokens {tuple(tokens)}, K {key_dim}, and a G that divides D {width}, the same "
                "for all keys."
            )


def _by_group(keys: Float[Array, "*tokens G K"]) -> Float[Array, "G K all_tokens"]:
    return jnp.moveaxis(keys.reshape(-1, *keys.shape[-2:]), 0, -1)


# Plain JAX, over [K, tokens, G, V].


def _write_read_plain(m: Array, key: Array, gain: Array, value: Array, query: Array) -> tuple[Array, ...]:
    grouped = functools.partial(_grouped, groups=len(key))
    before, k, g, q = grouped(m), *map(_spread, (key, gain, query))
    error = grouped(value).astype(m.dtype) - jnp.sum(k * before, axis=0)
    after = before + g * error
    readout = jnp.sum(q * after, axis=0).astype(value.dtype)
    return after.reshape(m.shape), error.reshape(value.shape), readout.reshape(value.shape)


def _pull_plain(
    m: Array, key: Array, gain: Array, query: Array, error: Array, of_after: Array, of_readout: Array
) -> tuple[Array, ...]:
    grouped = functools.partial(_grouped, groups=len(key))
    before, k, g, q, e = grouped(m), *map(_spread, (key, gain, query)), grouped(error)
    of_y = grouped(of_readout).astype(m.dtype)
    of_after = grouped(of_after) + q * of_y
    of_e = jnp.sum(g * of_after, axis=0)
    of_keys = (jnp.sum(x, axis=-1).transpose(2, 0, 1) for x in (-before * of_e, of_after * e, (before + g * e) * of_y))
    of_key, of_gain, of_query = of_keys
    of_before = (of_after - k * of_e).reshape(m.shape)
    return of_before, of_key, of_gain, of_e.reshape(error.shape).astype(of_readout.dtype), of_query


def _undo_plain(m: Array, key: Array, gain: Array, error: Array) -> tuple[Array, Array]:
    e = _grouped(error, len(key))
    before = _grouped(m, len(key)) - _spread(gain) * e
    return before.reshape(m.shape), (e + jnp.sum(_spread(key) * before, axis=0)).reshape(error.shape)


def _grouped(x: Array, groups: int) -> Array:
    return x.reshape(*x.shape[:-1], groups, -1)


def _spread(key: Array) -> Array:
    return key.transpose(1, 2, 0)[..., None]


class DeferredWrite(NamedTuple):
    """A write `M <- M + (v - M k) (g u)'` of all groups side by side, still to be done."""

    key: Float[Array, "*tokens G K"]
    gain: Float[Array, "*tokens G K"]
    """`g u`."""
    value: Float[Array, "*tokens D"]
    """In the compute type."""


class DoneWrite(NamedTuple):
    """The same write once it is done: what undoing it needs."""

    key: Float[Array, "*tokens G K"]
    gain: Float[Array, "*tokens G K"]
    error: Float[Array, "*tokens D"]


class FusedState(NamedTuple):
    """The memory before the last observation, and the covariance after it; float32.

    Between a read and the next write, the memory is that after the observation, and the last write is done.
    """

    memory: Float[Array, "K *tokens D"]
    covariance: Covariance
    last_write: DeferredWrite | DoneWrite


class FusedResidual(NamedTuple):
    """What undoing a read and the write after it needs: the write that the read did, and the write's own gain."""

    done: DoneWrite
    gain: Gain


@dataclass(frozen=True)
class Fused:
    """The form that defers every write to the next read, which does both by `write_read`; for the regressions.

    The numbers are those of `Recurrent`. A write to a state that was not read since the last one does that one first.
    """

    rule: WriteRule
    shape: MemoryShape
    dtype: DType = jnp.float32
    """Of the deferred values."""
    on_devices: Callable[..., Any] = lambda kernel, *arguments: kernel(*arguments)
    """Runs a kernel on every device's own tokens and groups; without a mesh, as it is."""

    def start(self, tokens: tuple[int, ...], alpha: Alpha, first: Observation | None = None) -> FusedState:
        """The state before the first write, or with the write of observation 0 deferred."""
        groups, value_dim, key_dim = self.shape
        memory = jnp.zeros((key_dim, *tokens, groups * value_dim))
        covariance = start_covariance(self.rule, self.shape, tokens, alpha)
        assert covariance is not None
        if first is None:
            key = jnp.zeros((*tokens, groups, key_dim))
            return FusedState(memory, covariance, DeferredWrite(key, key, jnp.zeros(memory.shape[1:], self.dtype)))
        return self._defer(memory, covariance, first)[0]

    def read(
        self, state: FusedState, query: Float[Array, "*tokens G K"]
    ) -> tuple[Float[Array, "*tokens G V"], FusedState]:
        """`M q` after the deferred write, and the state in which that write is done."""
        if isinstance(state.last_write, DoneWrite):
            raise ValueError("the last write is already done: the form fused allows one read between two writes.")
        key, gain, value = state.last_write
        memory, error, readout = self.on_devices(write_read, state.memory, key, gain, value, query)
        readout = readout.reshape(*query.shape[:-1], self.shape.value_dim)
        return readout, FusedState(memory, state.covariance, DoneWrite(key, gain, error))

    def write(self, state: FusedState, observation: Observation) -> tuple[FusedState, FusedResidual]:
        """The observation enters the covariance now, and the memory at the next read."""
        if isinstance(state.last_write, DeferredWrite):
            _, state = self.read(state, jnp.zeros_like(state.last_write.key))
        assert isinstance(state.last_write, DoneWrite)
        after, gain = self._defer(state.memory, state.covariance, observation)
        return after, FusedResidual(state.last_write, gain)

    def undo(self, state: FusedState, residual: FusedResidual) -> FusedState:
        """The state before the read, from that after the write."""
        rule, (key, gain, error) = self.rule.covariance, residual.done
        assert rule is not None
        covariance = over_tokens(rule.retreat, residual.gain.size.ndim)(state.covariance, residual.gain)
        memory, value = self.on_devices(undo_write, state.memory, key, gain, error)
        assert isinstance(state.last_write, DeferredWrite)
        value = value.astype(state.last_write.value.dtype)
        return FusedState(memory, covariance, DeferredWrite(key, gain, value))

    def _defer(
        self, memory: Float[Array, "K *tokens D"], covariance: Covariance, observation: Observation
    ) -> tuple[FusedState, Gain]:
        covariance, gain = observe_keys(self.rule, covariance, observation)
        value = observation.value.reshape(memory.shape[1:])
        key_and_gain = observation.key, gain.size[..., None] * gain.direction
        return FusedState(memory, covariance, DeferredWrite(*key_and_gain, value)), gain
