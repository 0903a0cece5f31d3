"""Measures recall of layer outputs from correlated keys for each write: `python scripts/retrieval.py`."""

from dataclasses import dataclass
from pathlib import Path

import interruptible  # noqa: F401 (first)

from ldm_jax.compare.retrieval import Task, retrieval_errors
from ldm_jax.config.command_line import parse, require_matplotlib, run_script
from ldm_jax.errors import UserError


@dataclass(frozen=True)
class Arguments:
    """Prints the recall error of each write, and of the batch solution, against the keys' correlation."""

    layers: tuple[int, ...] = (8, 16, 48)
    """Numbers of observations in the memory, one panel for each."""
    key_dim: int = 16
    """K: width of the keys."""
    alpha: float = 1000.0
    """Inverse ridge of rls and of the batch solution."""
    correlations: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99)
    """Correlations of the keys, from 0 (independent keys) to 1 (equal keys)."""
    trials: int = 64
    """Number of memories that an error is averaged over."""
    seed: int = 0
    """Random seed of keys and values."""
    out: Path | None = None
    """Picture to draw; its ending sets the format. None: none is drawn."""


def main() -> None:
    """Parses the arguments, measures, prints and plots."""
    arguments = parse(Arguments)
    if arguments.out is not None:
        require_matplotlib()
        from ldm_jax.plots import check_picture

        check_picture(arguments.out)
    errors = {}
    for layers in arguments.layers:
        task = Task(layers, arguments.key_dim, alpha=arguments.alpha, trials=arguments.trials)
        try:
            errors[task] = retrieval_errors(task, arguments.correlations, arguments.seed)
        except ValueError as error:
            raise UserError(str(error)) from error
        print(f"{layers} layers".ljust(16), *(f"{correlation:8g}" for correlation in arguments.correlations))
        for method, values in errors[task].items():
            print(f"  {method:<14}", *(f"{error:8.4f}" for error in values))
    if arguments.out is not None:
        from ldm_jax.compare.plots import plot_retrieval

        plot_retrieval(arguments.correlations, errors, arguments.out)
        print(arguments.out)


if __name__ == "__main__":
    run_script(main)
