"""What is done with a trained model: text and losses."""

from ldm_jax.infer.evaluation import Evaluation, make_evaluate
from ldm_jax.infer.generation import generate

__all__ = ["Evaluation", "generate", "make_evaluate"]
