"""Run by test_kernels.py in a process with eight devices: TPU kernels in interpret mode on meshes.

Prints for each case the largest difference to plain JAX on one device, over values and gradients, relative to the
largest entry of each.
"""

import json
import sys
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding

from ldm_jax.memory.fused import undo_write, write_read
from ldm_jax.mixers.depth_memory import on_own_shard
from ldm_jax.nn.softmax_attention import plain_attention, splash_attention
from ldm_jax.sharding import Axis, MeshAxis, partition

ROWS = Axis.BATCH, Axis.TOKENS


def make_mesh(sizes):
    return jax.make_mesh(sizes, tuple(axis.value for axis in MeshAxis), (jax.sharding.AxisType.Auto,) * 4)


def normal(*shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def value_and_pull(function, cotangents, *arguments):
    value, pull = jax.vjp(function, *arguments)
    return value, pull(cotangents)


def on_mesh(sizes, function, axes, cotangents, *arguments):
    """Value and gradients, with the arguments sharded by their axes."""
    mesh = make_mesh(sizes)
    with jax.set_mesh(mesh):
        specs = [partition(x.shape, own, dict(mesh.shape)) for x, own in zip(arguments, axes, strict=True)]
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arguments, specs, strict=True)]
        return jax.jit(partial(value_and_pull, function))(cotangents, *placed)


def largest(found, expected):
    pairs = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max()) for a, b in pairs)


def attention(sizes, segmented):
    """Splash attention with grouped heads against plain attention."""
    tokens = 128 * sizes[2]
    query, key, value, cotangent = normal(*[(4, tokens, heads, 64) for heads in (4, 2, 2, 4)])
    segments = np.sort(np.random.default_rng(1).integers(1, 4, (4, tokens)), axis=1).astype(np.int32)
    attend = partial(splash_attention, segments=segments if segmented else None, interpret=True)
    plain = partial(plain_attention, segments=segments if segmented else None)
    axes = (*ROWS, Axis.HEADS, None), *[(Axis.BATCH, None, Axis.HEADS, None)] * 2
    found = on_mesh(sizes, attend, axes, cotangent, query, key, value)
    return largest(found, jax.jit(partial(value_and_pull, plain))(cotangent, query, key, value))


def write_and_undo(sizes, _):
    """The memory's fused kernel and its undo, run on each device's shard, against plain JAX."""
    batch, tokens, groups, key_dim, width = 4, 16, 2, 3, 256
    of_values, of_keys = (batch, tokens, width), (batch, tokens, groups, key_dim)
    memory, value, *keys = normal((key_dim, *of_values), of_values, of_keys, of_keys, of_keys)
    key, gain, query = keys
    kernel = partial(on_own_shard, partial(write_read, interpret=True))
    axes = (None, *ROWS, Axis.GROUPS), *[(*ROWS, Axis.GROUPS, None)] * 2, (*ROWS, Axis.GROUPS)
    arguments = memory, key, gain, value, query
    cotangents = tuple(normal(memory.shape, of_values, of_values))
    found = on_mesh(sizes, kernel, (*axes, axes[1]), cotangents, *arguments)
    expected = jax.jit(partial(value_and_pull, write_read))(cotangents, *arguments)
    after, error, _ = found[0]
    with jax.set_mesh(make_mesh(sizes)):
        undone = jax.jit(partial(on_own_shard, partial(undo_write, interpret=True)))(after, key, gain, error)
    return largest([*found, undone], [*expected, (memory, value)])


def main() -> None:
    assert jax.device_count() == 8
    kinds = {"attention": attention, "write": write_and_undo}
    for kind, sizes, segmented in json.loads(sys.argv[1]):
        difference = kinds[kind](tuple(sizes), segmented)
        print(json.dumps({"case": [kind, sizes, segmented], "difference": difference}), flush=True)


if __name__ == "__main__":
    main()
