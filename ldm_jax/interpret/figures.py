"""What a trained depth mixer does: which outputs each read uses, what is forgotten, how exact the memory is."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from ldm_jax.config import Config
from ldm_jax.data import Batch
from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically, writing
from ldm_jax.infer.memory_figures import read_figures, replace_covariance, write_figures
from ldm_jax.memory import Observation
from ldm_jax.memory.dual import DualState
from ldm_jax.mixers import DepthMemoryConfig, MixerConfig, MixerState
from ldm_jax.mixers.depth_memory import Reader, make_form
from ldm_jax.mixers.ldm import LDMEnds
from ldm_jax.nn import Params, Transformer, model_graph
from ldm_jax.nn.attention import Documents, make_documents
from ldm_jax.nn.block import Sublayer, sublayer_name
from ldm_jax.typing import Tokens

Figures = dict[str, np.ndarray]
"""Means over tokens, by name. Readers: every sublayer and the end; sources: the embedding and every sublayer.

    contribution [readers, sources, G]            weight of a source in a read, times gate and gain; signed
    absolute_contribution [readers, sources, G]   mean of its absolute value
    gate [readers, G]; gain [readers, G]          of a read
    importance [sources, G]                       of a write
    forgetting [sources, G]                       of a write; 1 for the embedding
    log10_condition [readers, G]                  of P at the read; mean of the logarithm
    residual [sources, G]                         |v - M k| / |v| in the final memory; root mean square
    stream_rms [readers]                          of the stream that forms the query; root mean square

AttnRes has only contribution and absolute_contribution, with G = 1. The sources of block AttnRes are the embedding, the
sums of finished blocks, and the partial sum of the current block.
"""

_SQUARED = ("residual", "stream_rms")  # squares are averaged over tokens; the root is taken last


def reader_names(config: Config) -> list[str]:
    """The sublayers and the end."""
    return [sublayer_name(index) for index in range(config.model.sublayers)] + ["end"]


def source_names(config: Config) -> list[str]:
    """The embedding, then the sublayers, or for block AttnRes the blocks and the partial sum."""
    return config.mixer.options.source_names(reader_names(config)[:-1])


def inspect(config: Config, params: Params, windows: Batch, batch_size: int) -> Figures:
    """The figures of a model, means over the tokens of the windows, computed `batch_size` windows at a time.

    Raises:
        UserError: the mixer's reads are not weighted sums of earlier outputs.
    """
    mixer = _with_weights(config.mixer)
    options = mixer.options
    graph = model_graph(dataclasses.replace(config.model, scan=False), mixer)
    on_device = jax.jit(lambda params, windows: _figures(nnx.merge(graph, params), *windows))

    def figures(windows: Batch) -> dict[str, np.ndarray]:
        found = dict(jax.device_get(on_device(params, jax.tree.map(jnp.asarray, windows))))
        return replace_covariance(found, options.write) if isinstance(options, DepthMemoryConfig) else found

    starts = range(0, len(windows.tokens), batch_size)
    batches = [jax.tree.map(lambda x, start=start: x[start : start + batch_size, :-1], windows) for start in starts]
    parts = [figures(batch) for batch in batches]
    sizes = [len(batch.tokens) for batch in batches]
    means = {name: np.average([part[name] for part in parts], axis=0, weights=sizes) for name in parts[0]}
    return {name: np.sqrt(values) if name in _SQUARED else values for name, values in means.items()}


def _with_weights(config: MixerConfig) -> MixerConfig:
    options = config.options.with_weights()
    if options is not None:
        return config if options == config.options else dataclasses.replace(config, **{config.kind: options})
    used = config.options
    what = f"the write {used.write}" if isinstance(used, DepthMemoryConfig) else f"the mixer {config.kind}"
    raise UserError(
        f"{what} has no weights of earlier layers: give a run of ldm (write rls, sqrt_rls or additive), attnres or "
        "attnres_block."
    )


def _figures(model: Transformer, tokens: Tokens, segments: Int[Array, "B T"] | None) -> Mapping[str, Array]:
    documents = None if segments is None else make_documents(segments)
    state, rows = model.mixer.start(model.embedding(tokens)), []
    for sublayer, inputs in _sublayers(model, documents):
        rows.append(_reading(sublayer.mixer, state))
        x, state = sublayer.mixer.read(state)
        state, _ = sublayer.mixer.write(state, sublayer.function(sublayer.norm(x), *inputs))
    rows.append(_reading(model.mixer, state))
    figures = {name: _stacked([row[name] for row in rows]) for name in rows[0]}
    ends = model.mixer
    if isinstance(ends, LDMEnds):
        figures |= _of_observations(ends.config, model.config.width, state.memory)
    return figures


def _sublayers(model: Transformer, documents: Documents | None) -> Iterator[tuple[Sublayer, tuple[Any, ...]]]:
    """Each sublayer, with the further inputs of its function."""
    for index in range(model.config.depth):
        block = jax.tree.map(lambda leaf, index=index: leaf[index], model.blocks)
        yield block.attention, (documents,)
        yield block.mlp, ()


def _stacked(rows: Sequence[Array]) -> Array:
    """Stacks the rows; rows with fewer sources than the last are padded with zeros."""
    longest = rows[-1].shape
    if rows[0].shape == longest:
        return jnp.stack(rows)
    return jnp.stack([jnp.pad(row, [(0, a - b) for a, b in zip(longest, row.shape, strict=True)]) for row in rows])


def _reading(mixer: Any, state: MixerState) -> dict[str, Array]:
    """Of one read, by a sublayer's mixer or by the ends."""
    if not isinstance(state.memory, DualState):
        weights = _over_tokens(mixer.weights(state), axis=1)[:, None]
        return {"contribution": weights, "absolute_contribution": weights}
    reader: Reader = mixer.reader if isinstance(mixer, LDMEnds) else mixer.memory.reader
    weights = reader.weights(state.memory, state.stream)
    return read_figures(reader, state) | {
        "contribution": _over_tokens(weights, axis=1),
        "absolute_contribution": _over_tokens(jnp.abs(weights), axis=1),
        "stream_rms": jnp.mean(state.stream.astype(jnp.float32) ** 2),
    }


def _over_tokens(x: Array, axis: int) -> Array:
    return jnp.mean(x, axis=(axis, axis + 1))


def _of_observations(config: DepthMemoryConfig, width: int, memory: DualState) -> dict[str, Array]:
    """Of every write: importance, forgetting, and the squared residual in the final memory."""
    form, entries = make_form(config, width), memory.observations.entries

    def residual(entry: Observation) -> Array:
        error = entry.value - form.read(memory, entry.key)[0]
        energy = jnp.sum(entry.value.astype(jnp.float32) ** 2, axis=-1)
        return _over_tokens(jnp.sum(error**2, axis=-1) / energy, axis=0)

    rows = [write_figures(entry.forgetting, entry.importance) | {"residual": residual(entry)} for entry in entries]
    return jax.tree.map(lambda *figure: jnp.stack(figure), *rows)


def save_figures(config: Config, figures: Figures, directory: Path) -> Path:
    """Writes `inspection.json`: names of readers and sources, and the figures; returns its path. Raises UserError."""
    file = directory / "inspection.json"
    with writing(file):
        directory.mkdir(parents=True, exist_ok=True)
        names = {"readers": reader_names(config), "sources": source_names(config)}
        write_atomically(file, json.dumps(names | {name: x.tolist() for name, x in figures.items()}) + "\n")
    return file
