"""Models in safetensors files: Hugging Face checkpoints become runs, and runs are exported."""

from ldm_jax.convert.export import Format, StoredType, export, read_model
from ldm_jax.convert.hf_config import read_hf_config
from ldm_jax.convert.hf_import import import_hf
from ldm_jax.convert.weights import Weights, hf_layout, load_params

__all__ = [
    "Format",
    "StoredType",
    "Weights",
    "export",
    "hf_layout",
    "import_hf",
    "load_params",
    "read_hf_config",
    "read_model",
]
