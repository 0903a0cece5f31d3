"""Prints the loss of a trained model on held-out text: `python scripts/evaluate.py RUN [--data TEXT ...]`."""

from dataclasses import dataclass
from pathlib import Path

import interruptible  # noqa: F401 (first)
import tyro

from ldm_jax.config.command_line import parse, run_script
from ldm_jax.data import ValidationText, load_data, load_validation_text
from ldm_jax.errors import UserError
from ldm_jax.infer import Model, load_model, make_evaluate
from ldm_jax.mixers import DepthMemoryConfig, without_reads


@dataclass(frozen=True)
class Arguments:
    """Prints loss, perplexity and bits per byte with standard errors; of a depth memory also without its reads."""

    run: tyro.conf.Positional[Path]
    """Directory of the run, for its last checkpoint; RUN@STEP for that of a step."""
    data: tuple[str, ...] = ()
    """Files, patterns of files, or prepared corpora, evaluated one by one. None: the held-out text of the run's own
    data."""
    windows: int = 256
    """Number of windows, each of one context, spread evenly over the held-out text; at most as many as it has."""
    batch_size: int = 8
    """Windows per batch."""


def main() -> None:
    """Parses the arguments, evaluates and prints."""
    arguments = parse(Arguments)
    for name in ("windows", "batch_size"):
        if getattr(arguments, name) < 1:
            raise UserError(f"{name} is {getattr(arguments, name)}, but it must be at least 1.")
    run = load_model(arguments.run)
    for path in arguments.data:
        text = load_validation_text(path, run.config.data, run.tokenizer)
        _evaluate(run, text, f"tokens of {path}", arguments)
    if not arguments.data:
        data = load_data(run.config.data, run.config.model.vocabulary)
        if data.tokenizer.fingerprint != run.tokenizer.fingerprint:
            raise UserError("the run was trained with another tokenizer than that of its data now: restore the corpus.")
        if data.fingerprint != run.corpus:
            print("note: the corpus has changed since the run, so the held-out text may include training text")
        _evaluate(run, data, "held-out tokens", arguments)


def _evaluate(run: Model, text: ValidationText, tokens: str, arguments: Arguments) -> None:
    windows = text.validation_windows(arguments.windows)
    evaluate = make_evaluate(
        run.graph, arguments.batch_size, text.bytes_per_token, end_of_document=text.tokenizer.end_of_document
    )
    count = len(windows.weights)
    size = f"{count} window{'s' * (count != 1)} of {text.context} {tokens}"
    print(f"{arguments.run}, step {run.step}: {size}; +- standard error")
    result = evaluate(run.params, windows)
    print(f"validation loss: {result}")
    if isinstance(run.config.mixer.options, DepthMemoryConfig):
        silent = evaluate(without_reads(run.params), windows)
        print(f"with all read gains at zero: {silent}")
        worth, error = silent.difference(result)
        print(f"the memory's reads are worth {worth:.4f} +- {error:.4f} nats per token to this model")


if __name__ == "__main__":
    run_script(main)
