"""Causal softmax attention over whole windows: with its scores in memory, or by kernels that never hold them.

Over a mesh the tokens of the queries may be apart (`Axis.TOKENS`); keys and values have the whole window.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ldm_jax.sharding import Axis, partition, parts

TILE = 128
"""What each device of a TPU has of a window has to be a multiple of it, in tokens."""
BLOCK = 512
"""Tokens of queries and of keys that it has on the chip at a time."""

Queries = Float[Array, "B T H C"]
KeysOrValues = Float[Array, "B T J C"]
Segments = Int[Array, "B T"]


def plain_attention(query: Queries, key: KeysOrValues, value: KeysOrValues, segments: Segments | None) -> Queries:
    """`softmax(q k' / sqrt(C) + mask) v`: a token sees those up to itself, of its own segment if there are segments."""
    mask = _same_segment(segments)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation="xla")


def cudnn_attention(query: Queries, key: KeysOrValues, value: KeysOrValues, segments: Segments | None) -> Queries:
    """The same by cuDNN, on NVIDIA GPUs, in bfloat16."""
    mask = _same_segment(segments)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation="cudnn")


def _same_segment(segments: Segments | None) -> Bool[Array, "B 1 T T"] | None:
    """Whether two tokens are of one segment."""
    return None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]


def flash_attention(query: Queries, key: KeysOrValues, value: KeysOrValues, segments: Segments | None) -> Queries:
    """The same by the device's kernel: Splash attention on TPUs, cuDNN on NVIDIA GPUs.

    Elsewhere, and for what a kernel does not take (tokens of a device that are no multiple of `TILE` on a TPU; float32,
    or a window shared by devices, on a GPU), `plain_attention`.
    """
    if jax.default_backend() == "gpu":
        shared = parts((query.shape[1],), Axis.TOKENS) > 1
        attend = plain_attention if query.dtype == jnp.float32 or shared else cudnn_attention
        return attend(query, key, value, segments)
    if not _splash_takes(query.shape):
        return plain_attention(query, key, value, segments)
    return jax.lax.platform_dependent(query, key, value, segments, tpu=splash_attention, default=plain_attention)


def splash_attention(
    query: Queries, key: KeysOrValues, value: KeysOrValues, segments: Segments | None, *, interpret: bool = False
) -> Queries:
    """The same by JAX's kernel for TPUs, of every device its own rows, tokens and heads.

    Args:
        query: `T` a multiple of `TILE` on every device.
        key: of the whole window.
        value: as `key`.
        segments: of the whole window.
        interpret: run the kernel on any machine, slowly, as Pallas interprets it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    one_device = mesh.empty or mesh.size == 1
    rows, tokens, heads, _ = (None,) * 4 if one_device else _spec(query.shape, mesh)
    token_parts, head_parts = (1 if axis is None else mesh.shape[axis] for axis in (tokens, heads))
    length, block = query.shape[1], _largest_block(query.shape[1] // token_parts)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.CausalMask((length, length))] * query.shape[2]),
        head_shards=head_parts,
        q_seq_shards=token_parts,
        block_sizes=splash.BlockSizes(
            block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, use_fused_bwd_kernel=True
        ),
        interpret=interpret,
    )

    def attend(kernel: Any, query: Array, key: Array, value: Array, own: Array | None, seen: Array | None) -> Array:
        by_head = lambda x: x.transpose(0, 2, 1, 3)  # noqa: E731
        ids = None if own is None or seen is None else splash.SegmentIds(own, seen)
        scaled = query * query.shape[-1] ** -0.5
        return by_head(jax.vmap(kernel)(by_head(scaled), by_head(key), by_head(value), ids))

    if one_device:
        return attend(kernel, query, key, value, segments, segments)
    own = PartitionSpec(rows, tokens, heads, None)
    seen = PartitionSpec(rows, None, heads, None)
    ids = (None, None) if segments is None else (PartitionSpec(rows, tokens), PartitionSpec(rows, None))
    of_kernel = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(heads, tokens)))
    run = jax.shard_map(attend, in_specs=(of_kernel, own, seen, seen, *ids), out_specs=own, check_vma=False)
    return run(kernel, query, key, value, segments, segments)


def _spec(shape: tuple[int, ...], mesh: AbstractMesh) -> PartitionSpec:
    return partition(shape, (Axis.BATCH, Axis.TOKENS, Axis.HEADS, None), dict(mesh.shape))


def _splash_takes(shape: tuple[int, ...]) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    tokens = None if mesh.empty else _spec(shape, mesh)[1]
    return shape[1] % (TILE * (1 if tokens is None else mesh.shape[tokens])) == 0


def _largest_block(tokens: int) -> int:
    """The largest multiple of `TILE` up to `BLOCK` that divides a device's tokens."""
    return next(block for block in range(BLOCK, 0, -TILE) if tokens % block == 0)
