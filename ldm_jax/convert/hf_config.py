"""The `config.json` of a Hugging Face checkpoint as options of `[model]`."""

import enum
import json
from pathlib import Path
from typing import Any, NamedTuple

from ldm_jax.config import AttentionBias, ModelConfig
from ldm_jax.errors import UserError
from ldm_jax.options import check


class Architecture(enum.StrEnum):
    """The classes of transformers that have the function of our PreLN model."""

    LLAMA = "LlamaForCausalLM"
    MISTRAL = "MistralForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"


class HFConfig(NamedTuple):
    """What a `config.json` says of a model."""

    architecture: Architecture
    model: ModelConfig
    context: int
    """Tokens of a window."""
    end_of_document: int | None
    """`eos_token_id`, the first if there are several."""


_ROPE_KEYS = {
    "rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor",
}  # fmt: skip
_LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
# Keys that a config.json may leave out, with the values that transformers then has.
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": None,
    "num_key_value_heads": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": None,
}
_OWN_DEFAULTS: dict[Architecture, dict[str, Any]] = {
    Architecture.LLAMA: {},
    Architecture.MISTRAL: {"num_key_value_heads": 8, "sliding_window": 4096},
    Architecture.QWEN2: {"num_key_value_heads": 32},
    Architecture.QWEN3: {"num_key_value_heads": 32, "head_dim": 128},
}


def read_hf_config(directory: Path, context: int | None = None) -> HFConfig:
    """Reads the `config.json` in a directory, in the spelling of transformers 4 or 5.

    Args:
        directory: the checkpoint.
        context: tokens of a window, at most `max_position_embeddings`. None: as many.

    Raises:
        UserError: the file cannot be read, or the model has something that is not supported.
    """
    file = directory / "config.json"
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{directory} holds no Hugging Face checkpoint: it has no config.json.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}.") from error
    try:
        check(isinstance(table, dict), "it must be a JSON object.")
        return _parse(table, context)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error


def _parse(table: dict[str, Any], context: int | None) -> HFConfig:
    architecture = _architecture(table)
    if table.get("quantization_config") is not None:
        method = _field(table, "quantization_config", dict, {}).get("quant_method", "unknown")
        raise ValueError(f"the weights are quantised ({method}), but only bfloat16, float16 and float32 are supported.")
    table = _DEFAULTS | _OWN_DEFAULTS[architecture] | table
    check(table["hidden_act"] == "silu", f"hidden_act is {table['hidden_act']!r}, but only silu is supported.")
    llama = architecture is Architecture.LLAMA
    check(not (llama and _field(table, "mlp_bias", bool)), "mlp_bias is true, but biases in the MLP are not supported.")
    longest = _field(table, "max_position_embeddings", int)
    if context is not None:
        check(1 <= context <= longest, f"the context is {context}, but max_position_embeddings is {longest}.")
    window = longest if context is None else context
    _check_attention(table, architecture, window)
    if architecture is Architecture.QWEN2:
        bias = AttentionBias.QKV
    else:
        biased = architecture is not Architecture.MISTRAL and _field(table, "attention_bias", bool)
        bias = AttentionBias.ALL if biased else None
    theta, scaling = _rope(table)
    model = ModelConfig(
        depth=_field(table, "num_hidden_layers", int),
        width=_field(table, "hidden_size", int),
        heads=_field(table, "num_attention_heads", int),
        kv_heads=_field(table, "num_key_value_heads", int | None),
        head_dim=_field(table, "head_dim", int | None),
        mlp_width=_field(table, "intermediate_size", int),
        vocabulary=_field(table, "vocab_size", int),
        qk_norm=architecture is Architecture.QWEN3,
        attention_bias=bias,
        norm_eps=_field(table, "rms_norm_eps", float),
        rope_base=theta,
        rope_scaling=scaling,
        scale_embedding=False,
        tied=_field(table, "tie_word_embeddings", bool),
    )
    ends = table.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    return HFConfig(architecture, model, window, next((end for end in ends if type(end) is int), None))


def _architecture(table: dict[str, Any]) -> Architecture:
    names = table.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and names[0] in list(Architecture)):
        found = (
            ", ".join(map(str, names)) if isinstance(names, list) and names else f"model_type {table.get('model_type')}"
        )
        raise ValueError(f"the architecture is {found}, but only {', '.join(Architecture)} are supported.")
    return Architecture(names[0])


def _field(table: dict[str, Any], name: str, kind: Any, default: Any = None) -> Any:
    """The value of a key, checked for its type; without a default, the key must be there."""
    if name not in table and default is None:
        raise ValueError(f"it has no {name}.")
    value = table.get(name, default)
    number = kind is float and type(value) is int
    if not (number or (isinstance(value, kind) and (type(value) is not bool or kind is bool))):
        raise ValueError(f"{name} is {value!r}, which is not supported.")
    return float(value) if number else value


def _check_attention(table: dict[str, Any], architecture: Architecture, context: int) -> None:
    """Raises ValueError unless every layer attends to all earlier tokens of the context."""
    if architecture is Architecture.LLAMA:
        return  # which has no windows, whatever its config.json says
    kinds = set(_field(table, "layer_types", list | None) or [])
    check(
        kinds <= {"full_attention", "sliding_attention"},
        f"layer_types has {', '.join(sorted(map(str, kinds)))}, but only full_attention is supported.",
    )
    window = _field(table, "sliding_window", int | None)
    slides = architecture is Architecture.MISTRAL or _field(table, "use_sliding_window", bool)
    slides = slides or "sliding_attention" in kinds
    check(
        not slides or window is None or window >= context,
        f"sliding_window is {window}, which is shorter than the context {context}, but only full attention is "
        f"supported: give a --context of at most {window}.",
    )


def _rope(table: dict[str, Any]) -> tuple[float, tuple[float, ...] | None]:
    """Base and scaling of the rotary frequencies."""
    # rope_scaling is the older name of rope_parameters, and type that of rope_type.
    rope = _field(table, "rope_scaling", dict | None, {}) or _field(table, "rope_parameters", dict | None, {}) or {}
    rope = {"rope_theta": table.get("rope_theta", 10_000.0)} | rope
    unknown = sorted(rope.keys() - _ROPE_KEYS)
    kind = rope.get("rope_type", rope.get("type", "default"))
    check(kind in ("default", "llama3"), f"rope_type is {kind!r}, but only default and llama3 are supported.")
    check(not unknown, f"the rope parameters have {', '.join(unknown)}, which is not supported.")
    for part in (table.get("partial_rotary_factor"), rope.get("partial_rotary_factor")):
        check(part in (None, 1), f"partial_rotary_factor is {part}, but only 1 is supported.")
    scaling = tuple(float(_field(rope, name, float)) for name in _LLAMA3) if kind == "llama3" else None
    return _field(rope, "rope_theta", float), scaling
