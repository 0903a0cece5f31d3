"""Causal softmax attention over windows: in plain JAX, or by kernels that do not materialise the scores.

The queries' tokens may be sharded (`Axis.TOKENS`). Keys and values are those of the whole window.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ldm_jax.sharding import Axis, partition, parts

TILE = 128
"""The number of tokens per device must be a multiple of this for the TPU kernel."""
BLOCK = 512
"""The largest number of queries, and of keys, in a block of the TPU kernel."""

Queries = Float[Array, "B T H C"]
KeysOrValues = Float[Array, "B T J C"]
Segments = Int[Array, "B T"]


def plain_attention(query: Queries, key: KeysOrValues, value: KeysOrValues, segments: Segments | None) -> Queries:
    """`softmax(q k' / sqrt(C) + mask) v`. A token attends to itself and earlier tokens, of its segment if given."""
    mask = _same_segment(segments)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation="xla")


def cudnn_attention(query: Queries, key: KeysOrValues, value: KeysOrValues, segments: Segments | None) -> Queries:
    """`plain_attention` by cuDNN, for bfloat16 on NVIDIA GPUs."""
    mask = _same_segment(segments)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation="cudnn")


def _same_segment(segments: Segments | None) -> Bool[Array, "B 1 T T"] | None:
    """Whether two tokens belong to the same segment."""
    return None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]


def flash_attention(query: Queries, key: KeysOrValues, value: KeysOrValues, segments: Segments | None) -> Queries:
    """`plain_attention` by the platform's kernel: Splash attention on TPUs, cuDNN on NVIDIA GPUs.

    Falls back to `plain_attention` on other platforms and for unsupported inputs: on TPUs, a number of tokens per
    device that is not a multiple of `TILE`; on GPUs, float32 or sharded tokens.
    """
    if jax.default_backend() == "gpu":
        sharded = parts((query.shape[1],), Axis.TOKENS) > 1
        attend = plain_attention if query.dtype == jnp.float32 or sharded else cudnn_attention
        return attend(query, key, value, segments)
    if not _splash_supports(query.shape):
        return plain_attention(query, key, value, segments)
    return jax.lax.platform_dependent(query, key, value, segments, tpu=splash_attention, default=plain_attention)


def splash_attention(
    query: Queries, key: KeysOrValues, value: KeysOrValues, segments: Segments | None, *, interpret: bool = False
) -> Queries:
    """`plain_attention` by JAX's Splash attention kernel for TPUs, on each device's shard of rows, tokens and heads.

    Args:
        query: queries; the number of tokens per device must be a multiple of `TILE`.
        key: keys of the whole window.
        value: values of the whole window.
        segments: segments of the whole window.
        interpret: run the kernel in Pallas's interpreter, which is slow and works on every platform.
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

    def attend(
        kernel: Any, query: Array, key: Array, value: Array, query_ids: Array | None, key_ids: Array | None
    ) -> Array:
        by_head = lambda x: x.transpose(0, 2, 1, 3)  # noqa: E731
        ids = None if query_ids is None or key_ids is None else splash.SegmentIds(query_ids, key_ids)
        scaled = query * query.shape[-1] ** -0.5
        return by_head(jax.vmap(kernel)(by_head(scaled), by_head(key), by_head(value), ids))

    if one_device:
        return attend(kernel, query, key, value, segments, segments)
    queries, keys = PartitionSpec(rows, tokens, heads, None), PartitionSpec(rows, None, heads, None)
    ids = (None, None) if segments is None else (PartitionSpec(rows, tokens), PartitionSpec(rows, None))
    kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(heads, tokens)))
    specs = kernel_spec, queries, keys, keys, *ids
    run = jax.shard_map(attend, in_specs=specs, out_specs=queries, check_vma=False)
    return run(kernel, query, key, value, segments, segments)


def _spec(shape: tuple[int, ...], mesh: AbstractMesh) -> PartitionSpec:
    return partition(shape, (Axis.BATCH, Axis.TOKENS, Axis.HEADS, None), dict(mesh.shape))


def _splash_supports(shape: tuple[int, ...]) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    tokens = None if mesh.empty else _spec(shape, mesh)[1]
    return shape[1] % (TILE * (1 if tokens is None else mesh.shape[tokens])) == 0


def _largest_block(tokens: int) -> int:
    """The largest multiple of `TILE` up to `BLOCK` that divides the number of tokens per device."""
    return next(block for block in range(BLOCK, 0, -TILE) if tokens % block == 0)
