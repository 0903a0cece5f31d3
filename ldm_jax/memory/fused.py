"""The fused form: a write and the next read in one pass over the memory.

On an accelerator the cost of a depth memory is its HBM traffic: `M` is K times as wide as the stream. A write and a
read by separate operations move `M` three times. The fused operation moves it twice, and three times in the backward
pass.
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
    """A rank-one write followed by a read, for every token and group:

        e = v - M k,    M <- M + e (g u)',    y = M q

    With `g u = (beta/s) P k` it is the RLS write. On TPUs it is one kernel; on other platforms it is plain JAX with the
    same results. XLA does not partition the kernel: to shard tokens and groups, use `jax.shard_map` with
    `check_vma=False`. Forward-mode and second derivatives are not supported.

    Args:
        memory: `M` of all groups, concatenated along D; the K axis is first, so that the widest axis is last.
        key: `k`. Key, gain and query are cast to the memory's type.
        gain: `g u`.
        value: `v` of all groups, concatenated along D; any floating type.
        query: `q`.
        interpret: run the kernel in Pallas's interpreter, which is slow and works on every platform.

    Returns:
        The memory after the write; the error `e` in the memory's type, whose cotangent is ignored; and the readout `y`
        in the value's type.

    Raises:
        ValueError: the shapes do not match.
        TypeError: the value is not floating.
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
    """`write_read` with M `[K, tokens, D]`, keys `[G, K, tokens]` and values `[tokens, D]`."""
    return _choose(write_read_kernel, _write_read_plain, interpret)(m, key, gain, value, query)


def _forward(m: Array, key: Array, gain: Array, value: Array, query: Array, interpret: bool) -> tuple[Any, Any]:
    # Not in place: M is saved for the backward pass, so XLA would copy it first.
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
    """The inverse of `write_read`: the memory before the write, `M <- M - e (g u)'`, and the value `v = e + M k`.

    Arguments and errors as in `write_read`. It is not differentiable.
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
        raise TypeError(f"the value is {value.dtype}, but it must have a floating type.")
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
                f"[*tokens, G, K] with tokens {tuple(tokens)}, K {key_dim}, and a G that divides D {width} and is the "
                "same for key, gain and query."
            )


def _by_group(keys: Float[Array, "*tokens G K"]) -> Float[Array, "G K all_tokens"]:
    return jnp.moveaxis(keys.reshape(-1, *keys.shape[-2:]), 0, -1)


# Plain JAX implementations. Arrays are reshaped to [K, tokens, G, V].


def _write_read_plain(m: Array, key: Array, gain: Array, value: Array, query: Array) -> tuple[Array, ...]:
    grouped = functools.partial(_grouped, groups=len(key))
    before, k, g, q = grouped(m), *map(_broadcastable, (key, gain, query))
    error = grouped(value).astype(m.dtype) - jnp.sum(k * before, axis=0)
    after = before + g * error
    readout = jnp.sum(q * after, axis=0).astype(value.dtype)
    return after.reshape(m.shape), error.reshape(value.shape), readout.reshape(value.shape)


def _pull_plain(
    m: Array, key: Array, gain: Array, query: Array, error: Array, of_after: Array, of_readout: Array
) -> tuple[Array, ...]:
    grouped = functools.partial(_grouped, groups=len(key))
    before, k, g, q, e = grouped(m), *map(_broadcastable, (key, gain, query)), grouped(error)
    of_y = grouped(of_readout).astype(m.dtype)
    of_after = grouped(of_after) + q * of_y
    of_e = jnp.sum(g * of_after, axis=0)
    of_keys = (jnp.sum(x, axis=-1).transpose(2, 0, 1) for x in (-before * of_e, of_after * e, (before + g * e) * of_y))
    of_key, of_gain, of_query = of_keys
    of_before = (of_after - k * of_e).reshape(m.shape)
    return of_before, of_key, of_gain, of_e.reshape(error.shape).astype(of_readout.dtype), of_query


def _undo_plain(m: Array, key: Array, gain: Array, error: Array) -> tuple[Array, Array]:
    e = _grouped(error, len(key))
    before = _grouped(m, len(key)) - _broadcastable(gain) * e
    return before.reshape(m.shape), (e + jnp.sum(_broadcastable(key) * before, axis=0)).reshape(error.shape)


def _grouped(x: Array, groups: int) -> Array:
    return x.reshape(*x.shape[:-1], groups, -1)


def _broadcastable(key: Float[Array, "G K tokens"]) -> Float[Array, "K tokens G 1"]:
    return key.transpose(1, 2, 0)[..., None]


class DeferredWrite(NamedTuple):
    """A write `M <- M + (v - M k) (g u)'` of all groups that has not been applied to the memory yet."""

    key: Float[Array, "*tokens G K"]
    gain: Float[Array, "*tokens G K"]
    """`g u`."""
    value: Float[Array, "*tokens D"]
    """In the compute type."""


class AppliedWrite(NamedTuple):
    """A deferred write after it has been applied: its residual."""

    key: Float[Array, "*tokens G K"]
    gain: Float[Array, "*tokens G K"]
    error: Float[Array, "*tokens D"]


class FusedState(NamedTuple):
    """The memory before the last observation, the covariance after it, and the deferred write; float32.

    Between a read and the next write the last write has been applied: the memory is that after the observation.
    """

    memory: Float[Array, "K *tokens D"]
    covariance: Covariance
    last_write: DeferredWrite | AppliedWrite


class FusedResidual(NamedTuple):
    """The residual of a read and the write after it: the write that the read applied, and the gain of the new write."""

    applied: AppliedWrite
    gain: Gain


@dataclass(frozen=True)
class Fused:
    """The fused form: every write is deferred to the next read, which does both by `write_read`. For regressions only.

    The results are those of `Recurrent`. A write that follows a write without a read between them first applies the
    deferred one.
    """

    rule: WriteRule
    shape: MemoryShape
    dtype: DType = jnp.float32
    """Type of the deferred values."""
    on_devices: Callable[..., Any] = lambda kernel, *arguments: kernel(*arguments)
    """Runs a kernel on each device's shard of tokens and groups; the default is for one device."""

    def start(self, tokens: tuple[int, ...], alpha: Alpha, first: Observation | None = None) -> FusedState:
        """The state before the first write, or with a deferred write of observation 0."""
        groups, value_dim, key_dim = self.shape
        memory = jnp.zeros((key_dim, *tokens, groups * value_dim), jnp.float32)
        covariance = start_covariance(self.rule, self.shape, tokens, alpha)
        assert covariance is not None
        if first is None:
            key = jnp.zeros((*tokens, groups, key_dim), jnp.float32)
            return FusedState(memory, covariance, DeferredWrite(key, key, jnp.zeros(memory.shape[1:], self.dtype)))
        return self._defer(memory, covariance, first)[0]

    def read(
        self, state: FusedState, query: Float[Array, "*tokens G K"]
    ) -> tuple[Float[Array, "*tokens G V"], FusedState]:
        """`M q` after the deferred write, and the state with that write applied."""
        if isinstance(state.last_write, AppliedWrite):
            raise ValueError(
                "the state has been read since the last write, but the form fused allows one read between two writes: "
                "use the form recurrent to read more often."
            )
        key, gain, value = state.last_write
        memory, error, readout = self.on_devices(write_read, state.memory, key, gain, value, query)
        readout = readout.reshape(*query.shape[:-1], self.shape.value_dim)
        return readout, FusedState(memory, state.covariance, AppliedWrite(key, gain, error))

    def write(self, state: FusedState, observation: Observation) -> tuple[FusedState, FusedResidual]:
        """Updates the covariance, and defers the update of the memory to the next read."""
        if isinstance(state.last_write, DeferredWrite):
            _, state = self.read(state, jnp.zeros_like(state.last_write.key))
        assert isinstance(state.last_write, AppliedWrite)
        after, gain = self._defer(state.memory, state.covariance, observation)
        return after, FusedResidual(state.last_write, gain)

    def undo(self, state: FusedState, residual: FusedResidual) -> FusedState:
        """The state before the read, from the state after the write."""
        rule, (key, gain, error) = self.rule.covariance, residual.applied
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
        value = observation.value.reshape(memory.shape[1:]).astype(self.dtype)
        key_and_gain = observation.key, gain.size[..., None] * gain.direction
        return FusedState(memory, covariance, DeferredWrite(*key_and_gain, value)), gain
