"""A depth memory with its parameters: reader, writer and forgetting. The mathematics is in `ldm_jax.memory`.

The memory is per token, and nothing here mixes tokens, so causality is preserved.
"""

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from ldm_jax.memory import Observation
from ldm_jax.memory.dual import Dual, DualState
from ldm_jax.memory.fused import Fused, FusedState
from ldm_jax.memory.recurrent import MemoryForm, MemoryShape, Recurrent
from ldm_jax.memory.write import MemoryState
from ldm_jax.memory.writes import Write
from ldm_jax.mixers.mixer import MixerOptions
from ldm_jax.parameters import linear, param
from ldm_jax.sharding import Axis, constrain, partition
from ldm_jax.typing import DType

FORGETTING_START = 4.0  # initial theta; sigmoid(4) = .982
FUSED_WIDTH = 128  # lanes of a TPU's vector register
FUSED_SIZE = 8192  # largest K V of a group, for which the kernel uses 64 MiB of VMEM; a v4 chip has room for 2048

AnyState = MemoryState | DualState | FusedState


class Form(enum.StrEnum):
    """The forms of a depth memory.

    recurrent: carry the memory. dual: carry the inverse covariance and the values. fused: as recurrent, with one kernel
    for a write and the next read.
    """

    RECURRENT = "recurrent"
    DUAL = "dual"
    FUSED = "fused"


@dataclass(frozen=True)
class DepthMemoryConfig(MixerOptions):
    """Options of a depth memory."""

    groups: int = 4
    """G: the number of groups of the width. Each has its own memory, forgetting, gates and gain."""
    key_dim: int = 8
    """K: width of keys and queries. The state is K times as wide as the stream."""
    latent_dim: int = 32
    """R: width of the latent from which keys and importance, or queries and gates, are computed."""
    alpha: float = 10.0
    """Inverse of the ridge of the regression: at most 1e4 with the write rls, and 1e8 with sqrt_rls."""
    forgetting_floor: float | None = None
    """Lower bound of forgetting. None: 1e-3 ** (1 / sublayers), so that the ridge keeps 1e-3 of its weight."""
    unit_keys: bool = True
    """Scale keys and queries to unit length."""
    shared_key: bool = False
    """Use one key for all groups instead of one per group."""
    initial_gain: float = 2.0
    """Initial gain of reads, not negative. The read gate starts at one half."""
    write: Write = Write.RLS
    """The kind of write."""
    form: Form = Form.RECURRENT
    """recurrent: carry the memory. dual: carry the values and sum them; less HBM traffic for shallow models with a
    large K. fused: as recurrent, with one Pallas kernel for a write and the next read; for TPUs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("groups", "key_dim", "latent_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        smallest, largest = self.alpha_range
        if not smallest <= self.alpha <= largest:
            other = " The write sqrt_rls allows larger values." if self.write is Write.RLS else ""
            raise ValueError(
                f"alpha is {self.alpha}, but with the write {self.write} it must lie in [{smallest:g}, {largest:g}], "
                f"where float32 is precise enough.{other}"
            )
        if not 0 <= self.initial_gain < float("inf"):
            raise ValueError(f"initial_gain is {self.initial_gain}, but it must be finite and not negative.")
        covariance = self.write.rule.covariance
        floor = 1e-6 if covariance is None else covariance.smallest_forgetting
        if self.forgetting_floor is not None and not floor <= self.forgetting_floor <= 1:
            raise ValueError(
                f"forgetting_floor is {self.forgetting_floor}, but with the write {self.write} it must lie in "
                f"[{floor:g}, 1], where float32 is precise enough."
            )
        if self.write is Write.DELTA and not self.unit_keys:
            raise ValueError(
                "unit_keys is false, but write is delta, which diverges for keys longer than 1: set unit_keys to true."
            )
        if self.write is Write.DELTA and self.form is Form.DUAL:
            raise ValueError("form is dual, but write is delta, which has no dual form: set form to recurrent.")
        if self.form is Form.FUSED and self.write.rule.covariance is None:
            raise ValueError(
                f"form is fused, but write is {self.write}, which has no fused form: set form to recurrent."
            )

    @property
    def alpha_range(self) -> tuple[float, float]:
        """The smallest and the largest alpha. The writes additive and delta do not use it."""
        covariance = self.write.rule.covariance
        return 1e-30, 1e30 if covariance is None else covariance.largest_alpha

    @property
    def irreversible(self) -> str | None:
        """The writes additive and delta are irreversible, except in the form dual."""
        if self.form is Form.DUAL or self.write.rule.undo is not None:
            return None
        return f"the write {self.write} cannot be undone: it would divide by forgetting"

    def replacements_on(self, platform: str) -> dict[str, Any]:
        """The kernel of the form fused is for TPUs. The form recurrent has the same parameters and results."""
        return {"form": Form.RECURRENT} if self.form is Form.FUSED and platform != "tpu" else {}

    @property
    def sharded_sizes(self) -> dict[str, tuple[Axis, int]]:
        """The groups."""
        return {"groups": (Axis.GROUPS, self.groups)}

    def check_width(self, width: int) -> None:
        """Raises ValueError unless groups divides the width, and the form fused supports the groups' width."""
        if width % self.groups:
            raise ValueError(f"groups is {self.groups}, which does not divide the width {width}.")
        value_dim = width // self.groups
        if self.form is Form.FUSED and (value_dim % FUSED_WIDTH or value_dim * self.key_dim > FUSED_SIZE):
            raise ValueError(
                f"form is fused, which needs groups whose width is a multiple of {FUSED_WIDTH} and at most "
                f"{FUSED_SIZE} / key_dim, but key_dim is {self.key_dim} and groups is {self.groups}, so that a group "
                f"of the width {width} has width {value_dim}: change groups, or set form to recurrent."
            )

    def with_weights(self) -> "DepthMemoryConfig | None":
        """The same options with the form dual; None for the write delta, which has no dual form."""
        return None if self.write is Write.DELTA else dataclasses.replace(self, form=Form.DUAL)

    def training_numbers(self, sublayers: int) -> float:
        """An error and a value per write; the memory, its cotangent, and temporaries of their size."""
        return 2.0 * sublayers + 4 * self.key_dim


def make_form(
    config: DepthMemoryConfig, width: int, *, depth: int | None = None, dtype: DType = jnp.float32
) -> MemoryForm:
    """The form that the options select.

    Args:
        config: the options.
        width: D.
        depth: number of writes, for the form dual if the state is carried by a `jax.lax.scan`; None: the state grows.
        dtype: type of the values that the forms dual and fused carry.
    """
    rule, shape = config.write.rule, MemoryShape(config.groups, width // config.groups, config.key_dim)
    match config.form:
        case Form.RECURRENT:
            return Recurrent(rule, shape)
        case Form.DUAL:
            return Dual(rule, shape, depth, dtype)
        case Form.FUSED:
            return Fused(rule, shape, dtype, on_own_shard)


class DepthMemory(nnx.Module):
    """The reader, writer and forgetting of one layer, for use in any flax model. The caller carries the state.

        self.memory = DepthMemory(width, sublayers, rngs=rngs)          # in each layer
        x = h + self.memory.read(state, h)                              # the layer's input
        state = self.memory.write(state, output)                        # after the layer

    `init_memory` returns the first state. `sublayers` is the number of writes per token, which determines the default
    floor of forgetting.

    Raises:
        ValueError: the groups do not divide the width, or sublayers is below 1.
    """

    def __init__(
        self,
        width: int,
        sublayers: int,
        config: DepthMemoryConfig = DepthMemoryConfig(),
        *,
        dtype: DType = jnp.float32,
        rngs: nnx.Rngs,
    ):
        config.check_width(width)
        if sublayers < 1:
            raise ValueError(f"sublayers is {sublayers}, but it must be at least 1.")
        self.config, self.width, self.dtype = config, width, dtype
        floor = 1e-3 ** (1 / sublayers) if config.forgetting_floor is None else config.forgetting_floor
        self.reader = Reader(width, config, dtype=dtype, rngs=rngs)
        self.writer = Writer(width, config, dtype=dtype, rngs=rngs)
        self.forgetting = Forgetting(config.groups, floor)

    def read(self, state: AnyState, context: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        """`gain_g * gate_g * M_g q_g` of every group; query and gate are computed from the context `h`."""
        return self.reader(state, context)[0]

    def recall(self, state: AnyState, context: Float[Array, "*tokens D"]) -> tuple[Float[Array, "*tokens D"], AnyState]:
        """`read`, and the state for the next write. In the form fused, the deferred write has been applied to it."""
        return self.reader(state, context)

    def write(self, state: AnyState, output: Float[Array, "*tokens D"]) -> AnyState:
        """The state after writing an output; its key and importance are computed from it."""
        return self.record(state, output)[0]

    def record(self, state: AnyState, output: Float[Array, "*tokens D"]) -> tuple[AnyState, Any]:
        """`write`, and the residual for `undo`."""
        check_memory(state, output, self.config)
        return make_form(self.config, self.width, dtype=self.dtype).write(state, self.writer(output, self.forgetting()))

    def weights(self, state: DualState, context: Float[Array, "*tokens D"]) -> Float[Array, "N *tokens G"]:
        """The weight of every observation so far in a read; see `Reader.weights`."""
        return self.reader.weights(state, context)

    def undo(self, state: AnyState, residual: Any) -> AnyState:
        """The state before a `recall` and the `record` after it."""
        return make_form(self.config, self.width, dtype=self.dtype).undo(state, residual)


def init_memory(
    tokens: tuple[int, ...],
    width: int,
    config: DepthMemoryConfig = DepthMemoryConfig(),
    *,
    depth: int | None = None,
    dtype: DType = jnp.float32,
) -> AnyState:
    """The state before the first write, for an array of tokens.

    Args:
        tokens: the leading shape, such as `(B, T)`.
        width: D.
        config: the options of the `DepthMemory`.
        depth: number of writes, for the form dual if the state is carried by a `jax.lax.scan`; None: the state grows.
        dtype: type of the values that the forms dual and fused carry.

    Raises:
        ValueError: the groups do not divide the width.
    """
    config.check_width(width)
    return make_form(config, width, depth=depth, dtype=dtype).start(tokens, config.alpha)


def check_memory(state: AnyState, x: Float[Array, "*tokens D"], config: DepthMemoryConfig) -> None:
    """Raises ValueError unless the state has the form and shape for these tokens, this width and these options.

    Raises TypeError unless `x` is floating.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"the context or output has type {x.dtype}, but it must be floating, because reads have its type: use "
            "x.astype(jnp.float32)."
        )
    tokens, width, key_dim = x.shape[:-1], x.shape[-1], config.key_dim
    grouped = (*tokens, config.groups)
    match state:
        case MemoryState():
            form, found, expected = Form.RECURRENT, state.memory.shape, (*grouped, key_dim, width // config.groups)
        case FusedState():
            form, found, expected = Form.FUSED, state.memory.shape, (key_dim, *tokens, width)
        case DualState(covariance=None):  # the shapes of the cache are checked where it is used
            form, found, expected = Form.DUAL, grouped, grouped
        case DualState():
            assert state.covariance is not None
            form, found, expected = Form.DUAL, state.covariance.matrix.shape, (*grouped, key_dim, key_dim)
        case _:
            raise TypeError(
                f"the memory is a {type(state).__name__}, but it must be the state of init_memory or of a write."
            )
    if form is not config.form or found != expected:
        raise ValueError(
            f"the memory has form {form} and shape {found}, but for tokens {tokens} of width {width} it must have form "
            f"{config.form}, and in form {form} the shape {expected}: use the state of "
            "init_memory(h.shape[:-1], width, config) with the config of the DepthMemory."
        )


class Forgetting(nnx.Module):
    """`lambda = floor + (1 - floor) sigmoid(theta)`, `[G]`, float32; initially near 1."""

    def __init__(self, groups: int, floor: float):
        self.floor = floor
        self.theta = param(jnp.full((groups,), FORGETTING_START, jnp.float32), Axis.GROUPS)

    def __call__(self) -> Float[Array, " G"]:
        """The forgetting of every group."""
        return self.floor + (1 - self.floor) * jax.nn.sigmoid(self.theta[...])


class Reader(nnx.Module):
    """Reads the memory: `gain_g * gate_g * M_g q_g`, with query and gate from a latent `z = W n(h) + b` `[R]`.

    `n` is RMSNorm without a learned scale. The query has unit length if `unit_keys` is true. The gate is a sigmoid. The
    latent's matmul is in the compute type; everything computed from the latent is float32.
    """

    def __init__(self, width: int, config: DepthMemoryConfig, *, dtype: DType = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.norm = nnx.RMSNorm(width, use_scale=False, dtype=dtype, rngs=rngs)
        self.latent = _latent(width, config.latent_dim, dtype, rngs)
        self.query = linear(
            config.latent_dim, config.groups * config.key_dim, (None, Axis.GROUPS), dtype=None, rngs=rngs
        )
        self.gate = _gate(config.latent_dim, config.groups, 0.0, rngs)
        self.gain = param(jnp.full((config.groups,), config.initial_gain, jnp.float32), Axis.GROUPS)

    def __call__(
        self, state: AnyState, context: Float[Array, "*tokens D"]
    ) -> tuple[Float[Array, "*tokens D"], AnyState]:
        """The readout for a context `h`, concatenated over groups, in the context's type; and the state after it."""
        check_memory(state, context, self.config)
        query, scale = self.query_and_scale(context)
        values, state = make_form(self.config, context.shape[-1]).read(state, scale[..., None] * query)
        return values.reshape(context.shape).astype(context.dtype), state

    def query_and_scale(
        self, context: Float[Array, "*tokens D"]
    ) -> tuple[Float[Array, "*tokens G K"], Float[Array, "*tokens G"]]:
        """The query and the scale (gain times gate) of every group."""
        latent = self._latent_of(context)
        query = by_group(_keys(self.query(latent), self.config.groups, self.config))
        return query, self.gain[...] * jax.nn.sigmoid(self.gate(latent))

    def gates(self, context: Float[Array, "*tokens D"]) -> Float[Array, "*tokens G"]:
        """The read gate of every group."""
        return jax.nn.sigmoid(self.gate(self._latent_of(context)))

    def weights(self, state: DualState, context: Float[Array, "*tokens D"]) -> Float[Array, "N *tokens G"]:
        """The weight of every observation in a read, gain and gate included: the readout is the weighted sum of values.

        Only the form dual has weights.
        """
        form = make_form(self.config, context.shape[-1])
        if not isinstance(form, Dual):
            raise ValueError(f"form is {self.config.form}, but only the form dual has weights: set form to dual.")
        query, scale = self.query_and_scale(context)
        return scale * jnp.asarray(form.weights(state, query))

    def _latent_of(self, context: Float[Array, "*tokens D"]) -> Float[Array, "*tokens R"]:
        return self.latent(self.norm(context)).astype(jnp.float32)


class Writer(nnx.Module):
    """Makes the observation of a sublayer's output `o`, with key and importance from a latent `z = W o + b` `[R]`.

    The key has unit length if `unit_keys` is true. Importance is a softplus, initially 1. For the write delta, whose
    importance is a step size, it is a sigmoid, initially .88. Types as in `Reader`.
    """

    def __init__(self, width: int, config: DepthMemoryConfig, *, dtype: DType = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.latent = _latent(width, config.latent_dim, dtype, rngs)
        keys = 1 if config.shared_key else config.groups
        self.key = linear(config.latent_dim, keys * config.key_dim, (None, Axis.GROUPS), dtype=None, rngs=rngs)
        start = 2.0 if config.write is Write.DELTA else 0.5413248546129181  # softplus(.5413) = 1
        self.importance = _gate(config.latent_dim, config.groups, start, rngs)

    def __call__(self, output: Float[Array, "*tokens D"], forgetting: Float[Array, " G"]) -> Observation:
        """The observation of an output: key, value, forgetting and importance of every token and group."""
        config = self.config
        if output.ndim == 3:
            # Without this constraint, the partitioner of jaxlib 0.10 permutes rows when it reshards an output from a
            # width sharded over fsdp to groups sharded over tensor.
            output = constrain(output, Axis.BATCH, Axis.TOKENS, None)
        latent = self.latent(output).astype(jnp.float32)
        keys = _keys(self.key(latent), 1 if config.shared_key else config.groups, config)
        bound = jax.nn.sigmoid if config.write is Write.DELTA else jax.nn.softplus
        return Observation(
            key=by_group(jnp.broadcast_to(keys, (*output.shape[:-1], config.groups, config.key_dim))),
            value=by_group(output.reshape(*output.shape[:-1], config.groups, output.shape[-1] // config.groups)),
            forgetting=jnp.broadcast_to(forgetting, (*output.shape[:-1], config.groups)),
            importance=bound(self.importance(latent)),
        )


def by_group(x: Float[Array, "*tokens G n"]) -> Float[Array, "*tokens G n"]:
    """Shards an array by groups: writes and reads are independent between groups."""
    return constrain(x, Axis.BATCH, Axis.TOKENS, Axis.GROUPS, None) if x.ndim == 4 else x


def shard_state(state: AnyState) -> AnyState:
    """Shards a state `[B, T, ...]` by batch, tokens and groups. A dual state is returned unchanged."""
    axes = Axis.BATCH, Axis.TOKENS, Axis.GROUPS
    grouped = lambda leaf: constrain(leaf, *axes, *(None,) * (leaf.ndim - 3))  # noqa: E731
    match state:
        case MemoryState():
            return jax.tree.map(grouped, state)
        case FusedState(memory, covariance, last_write):
            return FusedState(constrain(memory, None, *axes), jax.tree.map(grouped, covariance), last_write)
        case DualState():
            return state


def on_own_shard(
    kernel: Callable[..., Any], memory: Float[Array, "K *tokens D"], key: Float[Array, "*tokens G K"], *others: Array
) -> Any:
    """Runs `write_read` or `undo_write` on each device's shard of tokens and groups: XLA does not partition kernels.

    Args:
        kernel: a function of `memory`, `key` and `others` that returns a memory and values.
        memory: the memory of all groups, concatenated along D.
        key: the keys of every group.
        others: arrays of the shape of `key`, and values of the shape of `memory` without its first axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or key.ndim != 4:
        return kernel(memory, key, *others)
    rows, tokens, groups, _ = partition(key.shape, (Axis.BATCH, Axis.TOKENS, Axis.GROUPS, None), dict(mesh.shape))
    of_memory, of_values = PartitionSpec(None, rows, tokens, groups), PartitionSpec(rows, tokens, groups)
    of_keys = PartitionSpec(rows, tokens, groups, None)
    of_others = (of_keys if other.ndim == key.ndim else of_values for other in others)
    results = jax.eval_shape(kernel, memory, key, *others)
    run = jax.shard_map(
        kernel,
        in_specs=(of_memory, of_keys, *of_others),
        out_specs=(of_memory, *[of_values] * (len(results) - 1)),
        check_vma=False,
    )
    return run(memory, key, *others)


def _latent(width: int, latent_dim: int, dtype: DType, rngs: nnx.Rngs) -> nnx.Linear:
    # The bias is random, so that layers have different keys and queries from the first step.
    normal = nnx.initializers.normal(1.0)
    return linear(width, latent_dim, (Axis.WIDTH, None), use_bias=True, bias_init=normal, dtype=dtype, rngs=rngs)


def _gate(latent_dim: int, groups: int, start: float, rngs: nnx.Rngs) -> nnx.Linear:
    zeros, constant = nnx.initializers.zeros_init(), nnx.initializers.constant(start)
    axes = (None, Axis.GROUPS)
    return linear(latent_dim, groups, axes, use_bias=True, kernel_init=zeros, bias_init=constant, dtype=None, rngs=rngs)


def _keys(flat: Float[Array, "*tokens GK"], groups: int, config: DepthMemoryConfig) -> Float[Array, "*tokens G K"]:
    """Keys or queries by group, scaled to unit length if `unit_keys` is true."""
    keys = flat.reshape(*flat.shape[:-1], groups, config.key_dim)
    if not config.unit_keys:
        return keys
    return keys * jax.lax.rsqrt(jnp.sum(keys**2, axis=-1, keepdims=True) + 1e-6)  # finite slope at 0
