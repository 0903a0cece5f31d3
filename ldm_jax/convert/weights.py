"""The tensors of safetensors files as the parameters of a model, and the reverse.

In a Hugging Face checkpoint a linear map is stored as `[outputs, inputs]`, and here as `[inputs, outputs]`; blocks are
stacked here. The files of any other model have our own names and shapes.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes  # noqa: F401 (NumPy's bfloat16)
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float32
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ldm_jax.config import ModelConfig
from ldm_jax.errors import UserError
from ldm_jax.mixers import MixerConfig, MixerKind
from ldm_jax.nn import Params
from ldm_jax.parameters import Path as ParameterPath
from ldm_jax.runs.run_directory import param_shapes

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


class StoredTensor(NamedTuple):
    """The tensor, or the stack of one tensor for each block, of a parameter."""

    names: tuple[str, ...]
    """One name; of a parameter that is a stack, one for each block."""
    parameter_shape: tuple[int, ...]
    stacked: bool = False
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        own = self.parameter_shape[1:] if self.stacked else self.parameter_shape
        return own[::-1] if self.transposed else own


class Layout(NamedTuple):
    """The tensors in which the parameters of a model are stored."""

    model: ModelConfig
    mixer: MixerConfig
    tensors: Mapping[ParameterPath, StoredTensor]


def hf_layout(model: ModelConfig) -> Layout:
    """The tensors of a PreLN model in a Hugging Face checkpoint."""

    def tensor(path: ParameterPath, shape: tuple[int, ...]) -> StoredTensor:
        transposed = path[-1] == "kernel"
        if path[0] != "blocks":
            return StoredTensor((_OUTSIDE[path],), shape, transposed=transposed)
        name, kind = _SUBLAYERS[path[1:-1]], "bias" if path[-1] == "bias" else "weight"
        names = tuple(f"model.layers.{n}.{name}.{kind}" for n in range(model.depth))
        return StoredTensor(names, shape, stacked=True, transposed=transposed)

    return Layout(model, PRELN, {path: tensor(path, shape) for path, shape in _shapes(model, PRELN).items()})


def own_layout(model: ModelConfig, mixer: MixerConfig) -> Layout:
    """The tensors of any model under the names of its parameters, such as `blocks.mlp.norm.scale`."""
    shapes = _shapes(model, mixer).items()
    return Layout(model, mixer, {path: StoredTensor((".".join(path),), shape) for path, shape in shapes})


def _shapes(model: ModelConfig, mixer: MixerConfig) -> dict[ParameterPath, tuple[int, ...]]:
    shapes = nnx.traversals.flatten_mapping(param_shapes(model, mixer))
    return {path: leaf.shape for path, leaf in shapes.items()}


class Weights:
    """The tensors of a checkpoint: the files are opened for each read, so that what is read does not stay in memory.

    Raises:
        UserError: files are missing or damaged.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._shards: dict[str, str] = {}
        self._shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        self.metadata: dict[str, str] = {}
        """What the files' headers hold beside the tensors."""
        for shard in self._files():
            with self._open(shard) as file:
                self.metadata |= file.metadata() or {}
                for name in file.keys():  # noqa: SIM118 (it is not a dictionary)
                    tensor = file.get_slice(name)
                    if name in self._shards:
                        both = f"{self._shards[name]} and {shard}"
                        raise UserError(f"{name} is in two files of {directory}, {both}: download it again.")
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

    def check(self, layout: Layout) -> None:
        """Raises UserError unless the tensors are those of the model, in types that can be read."""
        expected = {name: tensor.shape for tensor in layout.tensors.values() for name in tensor.names}
        if missing := [name for name in expected if name not in self._shapes]:
            raise UserError(f"{self._directory} lacks {_listed(missing)}, which its config.json implies.")
        for name, shape in expected.items():
            found, kind = self._shapes[name]
            if kind not in _TYPES:
                raise UserError(f"{name} in {self._directory} is {kind}, but it must be one of {', '.join(_TYPES)}.")
            if found != shape:
                raise UserError(f"{name} in {self._directory} has the shape {found}, but config.json implies {shape}.")
        unused = [name for name in self._shapes if name not in expected and not name.endswith(".rotary_emb.inv_freq")]
        tied = _OUTSIDE[("head", "kernel")]
        if tied in unused and self._is_tied():
            unused.remove(tied)
        if unused:
            raise UserError(f"{self._directory} has {_listed(unused)}, which its config.json does not imply.")

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


def load_params(weights: Weights, layout: Layout, mesh: Mesh | None = None) -> Params:
    """The parameters of a model, float32, each shard on the device where it lies on the mesh.

    A shard is filled tensor by tensor and then used by JAX: on the CPU as it is, without a copy.

    Args:
        weights: the tensors, which `Weights.check` has accepted.
        layout: the model.
        mesh: None for one device.
    """
    leaves = nnx.traversals.flatten_mapping(param_shapes(layout.model, layout.mixer, mesh))
    return nnx.traversals.unflatten_mapping(
        {path: _load(weights, layout.tensors[path], leaf.sharding) for path, leaf in leaves.items()}
    )


def _load(weights: Weights, tensor: StoredTensor, place: jax.sharding.Sharding) -> jax.Array:
    shape = tensor.parameter_shape
    shards: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}  # replicas share one on the CPU

    def shard(index: tuple[slice, ...] | None) -> Float32[np.ndarray, "..."]:
        assert index is not None
        key = tuple(each.indices(size) for each, size in zip(index, shape, strict=True))
        if key not in shards:
            shards[key] = _read(weights, tensor, index, tuple(len(range(*each)) for each in key))
        return shards[key]

    return jax.make_array_from_callback(shape, place, shard)


def _read(
    weights: Weights, tensor: StoredTensor, index: tuple[slice, ...], shape: tuple[int, ...]
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


def save_params(
    directory: Path, params: Params, layout: Layout, dtype: str, metadata: Mapping[str, str], shard_bytes: int
) -> None:
    """Writes the tensors to `model.safetensors`, or, if they are larger than `shard_bytes`, to shards with an index.

    The host needs memory for one shard beside the parameters.

    Args:
        directory: where the files are written.
        params: nested dictionaries of arrays.
        layout: the tensors.
        dtype: type of all tensors: float32, bfloat16 or float16.
        metadata: what the headers of all files also hold.
        shard_bytes: size of a file; a file with a single tensor may be larger.

    Raises:
        UserError: a parameter is too large for the type, or a file cannot be written.
    """
    kind, total = np.dtype(dtype), 0
    shards: list[dict[str, Any]] = []
    room = 0
    for path, number, name in (
        (path, number, name) for path, tensor in layout.tensors.items() for number, name in enumerate(tensor.names)
    ):
        size = math.prod(layout.tensors[path].shape) * kind.itemsize
        if size > room:
            shards.append({})
            room = shard_bytes
        room, total = room - size, total + size
        shards[-1][name] = path, number
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else [_SINGLE]
    for file, shard in zip(files, shards, strict=True):
        tensors = {name: _cast(_stored(params, layout, *place), kind, name) for name, place in shard.items()}
        try:
            save_file(tensors, directory / file, dict(metadata))
        except SafetensorError as error:
            raise UserError(f"{file} cannot be written: {error}.") from error
        (directory / file).chmod(directory.stat().st_mode & 0o666)  # the library allows only the owner to read it
    if len(shards) > 1:
        index = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (directory / _INDEX).write_text(text + "\n", encoding="utf-8")


def exact_type(params: Params, layout: Layout) -> str:
    """The smallest of bfloat16, float16 and float32 that holds every parameter exactly."""

    def tensors() -> Iterable[np.ndarray]:
        return (
            _stored(params, layout, path, n) for path, each in layout.tensors.items() for n in range(len(each.names))
        )

    def holds(kind: str) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):
            return all(
                np.array_equal(each.astype(kind).astype(np.float32).view(np.uint32), each.view(np.uint32))
                for each in tensors()
            )

    return next((kind for kind in ("bfloat16", "float16") if holds(kind)), "float32")


def _stored(params: Params, layout: Layout, path: ParameterPath, number: int) -> Float32[np.ndarray, "..."]:
    """One tensor: a block's part of a stacked parameter, or a parameter."""
    tensor, leaf = layout.tensors[path], params
    for name in path:
        leaf = leaf[name]
    array = np.asarray(leaf[number] if tensor.stacked else leaf)
    return array.T if tensor.transposed else array


def _cast(array: Float32[np.ndarray, "..."], kind: np.dtype, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(array.astype(kind, copy=False))
    if not np.array_equal(np.isfinite(cast), np.isfinite(array)):
        raise UserError(f"{name} has entries that are too large for {kind}: give --dtype float32.")
    return cast
