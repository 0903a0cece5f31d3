"""Text and losses from a trained model."""

from ldm_jax.infer.completion import Completion, complete, read_prompt
from ldm_jax.infer.evaluation import Evaluation, evaluate_text, make_evaluate
from ldm_jax.infer.generation import generate
from ldm_jax.infer.memory_figures import MemoryFigures, make_memory_figures
from ldm_jax.infer.model import Model, load_model
from ldm_jax.infer.sampling import Sampling

__all__ = [
    "Completion",
    "Evaluation",
    "MemoryFigures",
    "Model",
    "Sampling",
    "complete",
    "evaluate_text",
    "generate",
    "load_model",
    "make_evaluate",
    "make_memory_figures",
    "read_prompt",
]
