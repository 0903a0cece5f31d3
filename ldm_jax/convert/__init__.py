"""Models in the formats of other libraries: Hugging Face checkpoints become runs."""

from ldm_jax.convert.hf_config import read_hf_config
from ldm_jax.convert.hf_import import import_hf
from ldm_jax.convert.hf_weights import HFWeights, load_hf_params

__all__ = ["HFWeights", "import_hf", "load_hf_params", "read_hf_config"]
