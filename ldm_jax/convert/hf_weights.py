"""The tensors of a Hugging Face checkpoint as the parameters of a PreLN model.

A linear map is stored as `[outputs, inputs]` there and as `[inputs, outputs]` here; blocks are stacked here.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes  # noqa: F401 (NumPy's bfloat16)
import numpy as np
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding
from jaxtyping import Float32
from safetensors import SafetensorError, safe_open

from ldm_jax.config import ModelConfig
from ldm_jax.errors import UserError
from ldm_jax.mixers import MixerConfig, MixerKind
from ldm_jax.nn import Params, init_params, model_declarations
from ldm_jax.parameters import Path as ParameterPath
from ldm_jax.parameters import shardings

PRELN = MixerConfig(MixerKind("preln"))
PART_BYTES = 2**24
"""Larger tensors are read in parts of about this many bytes."""
ALIGNMENT = 64
"""Bytes to which an array must be aligned so that JAX uses it on the CPU without a copy."""
_TYPES = {"F32", "F16", "BF16"}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"

_OUTSIDE: dict[ParameterPath, str] = {
    ("embed", "embedding"): "model.embed_tokens.weight",
    ("norm", "scale"): "model.norm.weight",
    ("head", "kernel"): "lm_head.weight",
}
_SUBLAYERS: dict[ParameterPath, str] = {
    ("attention", "norm"): "input_layernorm",
    ("attention", "function", "query"): "self_attn.q_proj",
    ("attention", "function", "key"): "self_attn.k_proj",
    ("attention", "function", "value"): "self_attn.v_proj",
    ("attention", "function", "out"): "self_attn.o_proj",
    ("attention", "function", "query_norm"): "self_attn.q_norm",
    ("attention", "function", "key_norm"): "self_attn.k_norm",
    ("mlp", "norm"): "post_attention_layernorm",
    ("mlp", "function", "gate"): "mlp.gate_proj",
    ("mlp", "function", "up"): "mlp.up_proj",
    ("mlp", "function", "out"): "mlp.down_proj",
}


class HFTensor(NamedTuple):
    """The tensor, or the stack of one tensor for each block, of a parameter."""

    names: tuple[str, ...]
    """One name; of a parameter of blocks, one for each."""
    stacked: bool
    transposed: bool

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each tensor, from that of the parameter."""
        own = shape[1:] if self.stacked else shape
        return own[::-1] if self.transposed else own


def hf_tensor(path: ParameterPath, depth: int) -> HFTensor:
    """The tensors of the parameter with this path."""
    transposed = path[-1] == "kernel"
    if path[0] != "blocks":
        return HFTensor((_OUTSIDE[path],), False, transposed)
    name, kind = _SUBLAYERS[path[1:-1]], "bias" if path[-1] == "bias" else "weight"
    return HFTensor(tuple(f"model.layers.{n}.{name}.{kind}" for n in range(depth)), True, transposed)


class HFWeights:
    """The tensors of a checkpoint: the files are opened for each read, so that what is read does not stay in memory.

    Raises:
        UserError: files are missing or damaged.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._shards: dict[str, str] = {}
        self._shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        for shard in self._files():
            with self._open(shard) as file:
                for name in file.keys():  # noqa: SIM118 (it is not a dictionary)
                    tensor = file.get_slice(name)
                    self._shards[name] = shard
                    self._shapes[name] = tuple(tensor.get_shape()), tensor.get_dtype()

    def _files(self) -> list[str]:
        if (self._directory / _SINGLE).is_file():
            return [_SINGLE]
        index = self._directory / _INDEX
        if not index.is_file():
            raise UserError(
                f"{self._directory} has neither {_SINGLE} nor {_INDEX}: save the checkpoint with safetensors."
            )
        try:
            files = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} cannot be read: {error!r}.") from error
        if missing := [name for name in files if not (self._directory / name).is_file()]:
            raise UserError(f"{index} names {missing[0]}, which is missing: download the whole checkpoint.")
        return files

    def _open(self, shard: str) -> Any:
        try:
            return safe_open(self._directory / shard, framework="np")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self._directory / shard} cannot be read: {error}.") from error

    def check(self, model: ModelConfig) -> None:
        """Raises UserError unless the tensors are those of the model, in types that can be read."""
        expected = {name: tensor.shape(leaf.shape) for _, leaf, tensor in _parameters(model) for name in tensor.names}
        unused = [name for name in self._shapes if name not in expected and not name.endswith(".rotary_emb.inv_freq")]
        tied = _OUTSIDE[("head", "kernel")]
        if tied in unused and self._is_tied():
            unused.remove(tied)
        if missing := [name for name in expected if name not in self._shapes]:
            raise UserError(f"{self._directory} lacks {_listed(missing)}, which its config.json implies.")
        if unused:
            raise UserError(f"{self._directory} has {_listed(unused)}, which its config.json does not imply.")
        for name, shape in expected.items():
            found, kind = self._shapes[name]
            if kind not in _TYPES:
                raise UserError(f"{name} in {self._directory} is {kind}, but it must be one of {', '.join(_TYPES)}.")
            if found != shape:
                raise UserError(f"{name} in {self._directory} has the shape {found}, but config.json implies {shape}.")

    def _is_tied(self) -> bool:
        """Whether the checkpoint also stores the head of a tied model, with the entries of the embedding."""
        head, embedding = (self._shapes.get(_OUTSIDE[path]) for path in (("head", "kernel"), ("embed", "embedding")))
        if head != embedding or head is None:
            return False
        names = (_OUTSIDE[path] for path in (("head", "kernel"), ("embed", "embedding")))
        parts = zip(*(self.parts(name, (slice(None), slice(None))) for name in names), strict=True)
        return all(np.array_equal(a, b) for (_, a), (_, b) in parts)

    def parts(self, name: str, index: tuple[slice, ...]) -> Iterator[tuple[slice, Float32[np.ndarray, "..."]]]:
        """Reads a slice of a tensor in parts: each with the rows, counted from the first of the slice, that it has."""
        shape, _ = self._shapes[name]
        start, stop, _ = index[0].indices(shape[0])
        row = 4 * math.prod(len(range(*each.indices(size))) for each, size in zip(index[1:], shape[1:], strict=True))
        rows = max(PART_BYTES // row, 1)
        for first in range(start, stop, rows):
            last = min(first + rows, stop)
            with self._open(self._shards[name]) as file:
                part = file.get_slice(name)[(slice(first, last), *index[1:])]
            yield slice(first - start, last - start), part.astype(np.float32, copy=False)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")


def _parameters(model: ModelConfig) -> list[tuple[ParameterPath, jax.ShapeDtypeStruct, HFTensor]]:
    shapes = nnx.traversals.flatten_mapping(jax.eval_shape(lambda: init_params(model, PRELN, 0)))
    return [(path, leaf, hf_tensor(path, model.depth)) for path, leaf in shapes.items()]


def load_hf_params(weights: HFWeights, model: ModelConfig, mesh: Mesh | None = None) -> Params:
    """The parameters of a PreLN model, float32, each shard on the device where it lies on the mesh.

    A shard is filled tensor by tensor and then used by JAX: on the CPU as it is, without a copy.

    Args:
        weights: the tensors, which `HFWeights.check` has accepted.
        model: the model.
        mesh: None for one device.
    """
    parameters = _parameters(model)
    shapes = nnx.traversals.unflatten_mapping({path: leaf for path, leaf, _ in parameters})
    if mesh is None:
        places = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), shapes)
    else:
        places = shardings(shapes, mesh, model_declarations(model, PRELN))
    places = nnx.traversals.flatten_mapping(places)
    return nnx.traversals.unflatten_mapping(
        {path: _load(weights, tensor, leaf.shape, places[path]) for path, leaf, tensor in parameters}
    )


def _load(weights: HFWeights, tensor: HFTensor, shape: tuple[int, ...], place: jax.sharding.Sharding) -> jax.Array:
    shards: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}  # replicas share one on the CPU

    def shard(index: tuple[slice, ...] | None) -> Float32[np.ndarray, "..."]:
        assert index is not None
        key = tuple(each.indices(size) for each, size in zip(index, shape, strict=True))
        if key not in shards:
            shards[key] = _read(weights, tensor, index, tuple(len(range(*each)) for each in key))
        return shards[key]

    return jax.make_array_from_callback(shape, place, shard)


def _read(
    weights: HFWeights, tensor: HFTensor, index: tuple[slice, ...], shape: tuple[int, ...]
) -> Float32[np.ndarray, "..."]:
    """A slice of a parameter."""
    filled = _aligned(shape)
    names, own = (tensor.names[index[0]], index[1:]) if tensor.stacked else (tensor.names, index)
    targets = filled if tensor.stacked else filled[None]
    for name, target in zip(names, targets, strict=True):
        target = target.T if tensor.transposed else target
        for rows, part in weights.parts(name, own[::-1] if tensor.transposed else own):
            target[rows] = part
    return filled


def _aligned(shape: tuple[int, ...]) -> Float32[np.ndarray, "..."]:
    count = math.prod(shape)
    memory = np.empty(4 * count + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + 4 * count].view(np.float32).reshape(shape)
