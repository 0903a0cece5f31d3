"""Recall of one layer's output from correlated keys, by write: `python scripts/retrieval.py [--out retrieval.png]`."""

from dataclasses import dataclass
from pathlib import Path

from ldm_jax.config.command_line import parse, require_matplotlib, run_script
from ldm_jax.errors import UserError


@dataclass(frozen=True)
class Arguments:
    """Prints and draws the recall error against the correlation of keys: rls, delta, additive, batch solution."""

    layers: tuple[int, ...] = (8, 16, 48)
    """Observations in the memory; a panel each."""
    key_dim: int = 16
    """Width of the keys."""
    alpha: float = 1000.0
    """One over the ridge, of rls and of the batch solution."""
    correlations: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99)
    """From 0, random keys, to 1, the same key for all."""
    trials: int = 64
    """Memories that an error is averaged over."""
    seed: int = 0
    """Of keys and values."""
    out: Path = Path("retrieval.png")
    """The picture; its ending says which format."""


def main() -> None:
    """Parses, measures, prints and draws."""
    arguments = parse(Arguments)
    require_matplotlib()
    from ldm_jax.compare.retrieval import Task, plot_retrieval, retrieval_errors

    errors = {}
    for layers in arguments.layers:
        task = Task(layers, arguments.key_dim, alpha=arguments.alpha, trials=arguments.trials)
        try:
            errors[task] = retrieval_errors(task, arguments.correlations, arguments.seed)
        except ValueError as error:
            raise UserError(str(error)) from error
        print(f"{layers} layers".ljust(16), *(f"{correlation:8g}" for correlation in arguments.correlations))
        for method, found in errors[task].items():
            print(f"  {method:<14}", *(f"{error:8.4f}" for error in found))
    plot_retrieval(arguments.correlations, errors, arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    run_script(main)
