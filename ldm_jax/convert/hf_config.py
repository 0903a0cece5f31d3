"""The `config.json` of a Hugging Face checkpoint as options of `[model]`, and the reverse."""

import enum
import json
from pathlib import Path
from typing import Any, NamedTuple

from ldm_jax.config import AttentionBias, AttentionImplementation, ModelConfig
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


CONFIG_FILE = "config.json"
_FIELDS: dict[str, tuple[str, Any]] = {
    "depth": ("num_hidden_layers", int),
    "width": ("hidden_size", int),
    "heads": ("num_attention_heads", int),
    "kv_heads": ("num_key_value_heads", int | None),
    "head_dim": ("head_dim", int | None),
    "mlp_width": ("intermediate_size", int),
    "vocabulary": ("vocab_size", int),
    "norm_eps": ("rms_norm_eps", float),
    "tied": ("tie_word_embeddings", bool),
}
"""Options of `[model]`, with the key of `config.json` that has the same meaning, and its type."""
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
    table = read_table(directory)
    try:
        return _parse(table, context)
    except ValueError as error:
        raise UserError(f"{directory / CONFIG_FILE}: {error}") from error


def read_table(directory: Path) -> dict[str, Any]:
    """The content of the `config.json` in a directory. Raises UserError if it cannot be read, or is no JSON object."""
    file = directory / CONFIG_FILE
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{directory} holds no Hugging Face checkpoint: there is no {file}. Give a local directory, such as hf "
            "download NAME --local-dir DIR makes."
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}.") from error
    if not isinstance(table, dict):
        raise UserError(f"{file} is not a JSON object: restore the file.")
    return table


def _parse(table: dict[str, Any], context: int | None) -> HFConfig:
    architecture = _architecture(table)
    if table.get("quantization_config") is not None:
        method = read_key(table, "quantization_config", dict, {}).get("quant_method", "unknown")
        raise ValueError(f"the weights are quantised ({method}), but only bfloat16, float16 and float32 are supported.")
    table = _DEFAULTS | _OWN_DEFAULTS[architecture] | table
    check(table["hidden_act"] == "silu", f"hidden_act is {table['hidden_act']!r}, but only silu is supported.")
    llama = architecture is Architecture.LLAMA
    check(
        not (llama and read_key(table, "mlp_bias", bool)), "mlp_bias is true, but biases in the MLP are not supported."
    )
    longest = read_key(table, "max_position_embeddings", int)
    window = longest if context is None else context
    check(
        1 <= window <= longest, f"the context is {window}, but it must lie in [1, {longest}] (max_position_embeddings)."
    )
    _check_attention(table, architecture, window)
    if architecture is Architecture.QWEN2:
        bias = AttentionBias.QKV
    else:
        biased = architecture is not Architecture.MISTRAL and read_key(table, "attention_bias", bool)
        bias = AttentionBias.ALL if biased else None
    theta, scaling = _rope(table)
    fields = {option: read_key(table, name, kind) for option, (name, kind) in _FIELDS.items()}
    # The defaults, so that equal models have equal options.
    if fields["kv_heads"] == fields["heads"]:
        fields["kv_heads"] = None
    if fields["head_dim"] is not None and fields["head_dim"] * fields["heads"] == fields["width"]:
        fields["head_dim"] = None
    model = ModelConfig(
        **fields,
        qk_norm=architecture is Architecture.QWEN3,
        attention_bias=bias,
        rope_base=theta,
        rope_scaling=scaling,
        scale_embedding=False,
    )
    ends = table.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    return HFConfig(architecture, model, window, next((end for end in ends if type(end) is int), None))


def write_hf_config(model: ModelConfig, context: int, start: int | None, end_of_document: int | None) -> dict[str, Any]:
    """The `config.json`, in the spelling of transformers 4, which 5 also reads, of a model without `scale_embedding`.

    Raises:
        UserError: no class of transformers has the function of the model.
    """
    bias = model.attention_bias
    if model.attention is AttentionImplementation.LOCAL:
        raise UserError("model.attention is local, which no class of transformers has: give --format ldm_jax.")
    if model.qk_norm and bias is AttentionBias.QKV:
        raise UserError(
            "model.attention_bias is qkv and model.qk_norm is true, which no class of transformers has together: give "
            "--format ldm_jax."
        )
    if bias is AttentionBias.QKV:
        architecture = Architecture.QWEN2
    else:
        architecture = Architecture.QWEN3 if model.qk_norm else Architecture.LLAMA
    given = {"kv_heads": model.kv_heads_or_heads, "head_dim": model.head_dim_or_default}
    rope = None
    if model.rope_scaling is not None:
        rope = {"rope_type": "llama3"} | dict(zip(_LLAMA3, model.rope_scaling, strict=True))
        if (length := model.rope_scaling[-1]).is_integer():  # transformers wants an integer
            rope[_LLAMA3[-1]] = int(length)
    return {
        "architectures": [architecture.value],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        **{name: given.get(option, getattr(model, option)) for option, (name, _) in _FIELDS.items()},
        **({} if architecture is Architecture.QWEN2 else {"attention_bias": bias is AttentionBias.ALL}),
        "hidden_act": "silu",
        "rope_theta": model.rope_base,
        "rope_scaling": rope,
        "max_position_embeddings": context,
        "bos_token_id": start,  # if it is absent, transformers assumes 1, and 2 for the other
        "eos_token_id": end_of_document,
    }


def _architecture(table: dict[str, Any]) -> Architecture:
    names = table.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and names[0] in list(Architecture)):
        found = (
            ", ".join(map(str, names)) if isinstance(names, list) and names else f"model_type {table.get('model_type')}"
        )
        raise ValueError(f"the architecture is {found}, but only {', '.join(Architecture)} are supported.")
    return Architecture(names[0])


def read_key(table: dict[str, Any], name: str, kind: Any, default: Any = None) -> Any:
    """The value of a key, checked for its type; without a default, the key must be there. Raises ValueError."""
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
    kinds = set(read_key(table, "layer_types", list | None) or [])
    check(
        kinds <= {"full_attention", "sliding_attention"},
        f"layer_types has {', '.join(sorted(map(str, kinds)))}, but only full_attention is supported.",
    )
    window = read_key(table, "sliding_window", int | None)
    slides = architecture is Architecture.MISTRAL or read_key(table, "use_sliding_window", bool)
    slides = slides or "sliding_attention" in kinds
    check(
        not slides or window is None or window >= context,
        f"sliding_window is {window}, which is shorter than the context {context}, but only full attention is "
        f"supported: give a --context of at most {window}.",
    )


def _rope(table: dict[str, Any]) -> tuple[float, tuple[float, ...] | None]:
    """Base and scaling of the rotary frequencies."""
    # rope_scaling is the older name of rope_parameters, and type that of rope_type.
    rope = read_key(table, "rope_scaling", dict | None, {}) or read_key(table, "rope_parameters", dict | None, {}) or {}
    rope = {"rope_theta": table.get("rope_theta", 10_000.0)} | rope
    unknown = sorted(rope.keys() - _ROPE_KEYS)
    kind = rope.get("rope_type", rope.get("type", "default"))
    check(kind in ("default", "llama3"), f"rope_type is {kind!r}, but only default and llama3 are supported.")
    check(not unknown, f"the rope parameters have {', '.join(unknown)}, which is not supported.")
    for part in (table.get("partial_rotary_factor"), rope.get("partial_rotary_factor")):
        check(part in (None, 1), f"partial_rotary_factor is {part}, but only 1 is supported.")
    scaling = tuple(float(read_key(rope, name, float)) for name in _LLAMA3) if kind == "llama3" else None
    return read_key(rope, "rope_theta", float), scaling
