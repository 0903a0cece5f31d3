"""Prints the loss of a trained model on held-out text: `python scripts/evaluate.py RUN [--data CORPUS ...]`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import tyro

from ldm_jax.config.command_line import parse, run_script
from ldm_jax.data import load_data
from ldm_jax.errors import UserError
from ldm_jax.infer import make_evaluate
from ldm_jax.mixers import DepthMemoryConfig, without_reads
from ldm_jax.train import load_run


@dataclass(frozen=True)
class Arguments:
    """Prints loss, perplexity and bits per byte with standard errors; of a depth memory also without its reads."""

    run: tyro.conf.Positional[Path]
    """Directory of the run."""
    data: tuple[str, ...] = ()
    """Prepared corpora, evaluated one by one. None: the held-out text of the run's own data."""
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
    run = load_run(arguments.run)
    trained_on = run.config.data
    corpora = [
        dataclasses.replace(trained_on, corpus=None, path=None, corpora=(directory,), weights=())
        for directory in arguments.data
    ]
    for config in corpora or [trained_on]:
        data = load_data(config, max(run.config.model.vocabulary, 2**31))  # the tokenizers are compared instead
        if data.tokenizer.fingerprint != run.tokenizer.fingerprint:
            raise UserError(
                f"{config.corpora[0]} has another tokenizer than the run: prepare it with the run's tokenizer, "
                "--tokenizer bytes or the tokenizer.json of the corpus that the run was trained on."
            )
        if not corpora and data.fingerprint != run.corpus:
            print("note: the corpus has changed since the run, so the held-out text may include training text")
        windows = data.validation_windows(arguments.windows)
        evaluate = make_evaluate(run.graph, arguments.batch_size, data.bytes_per_token)
        where = f" of {' and '.join(config.corpora)}" if config.corpora else ""
        size = f"{len(windows.weights)} windows of {config.context} held-out tokens"
        print(f"step {run.step}, {size}{where}; +- standard error")
        result = evaluate(run.params, windows)
        print(f"validation loss: {result}")
        if isinstance(run.config.mixer.options, DepthMemoryConfig):
            silent = evaluate(without_reads(run.params), windows)
            print(f"with all read gains at zero: {silent}")
            worth, error = silent.difference(result)
            print(f"the memory's reads are worth {worth:.4f} +- {error:.4f} nats per token to this model")


if __name__ == "__main__":
    run_script(main)
