"""Prints the loss of a trained model on its held-out text: `python scripts/evaluate.py RUN`."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from ldm_jax.cli import parse, run_script
from ldm_jax.data import load_data
from ldm_jax.errors import UserError
from ldm_jax.infer import make_evaluate
from ldm_jax.mixers import MixerKind, without_reads
from ldm_jax.train import load_run


@dataclass(frozen=True)
class Arguments:
    """Prints the loss of a trained model on its held-out text; of a depth memory also without its reads."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    windows: int = 256
    """Windows of one context each, spread evenly over the held-out text; at most as many as it has."""
    batch_size: int = 8
    """Windows computed at a time."""


def main() -> None:
    """Parses and prints."""
    arguments = parse(Arguments)
    for name in ("windows", "batch_size"):
        if getattr(arguments, name) < 1:
            raise UserError(f"{name} is {getattr(arguments, name)}, but it must be at least 1.")
    run = load_run(arguments.run)
    data = load_data(run.config.data, run.config.model.vocabulary)
    if data.fingerprint != run.corpus:
        print("note: the corpus is not the one that the run was trained on, so held-out text may have been seen")
    windows = data.validation_windows(arguments.windows).tokens
    evaluate = make_evaluate(run.graph, arguments.batch_size)

    def show(name: str, params: object) -> float:
        result = evaluate(params, windows)
        print(
            f"{name}: {result.loss:.4f} +- {result.standard_error:.4f} nats a token (standard error), "
            f"{result.bits_per_byte / data.bytes_per_token:.4f} bits a byte"
        )
        return result.loss

    print(f"step {run.step}, {len(windows)} windows of {run.config.data.context} tokens of held-out text")
    loss = show("validation loss", run.params)
    if run.config.mixer.kind is MixerKind.LDM:
        silent = show("with all read gains at zero", without_reads(run.params))
        print(f"the memory's reads are worth {silent - loss:.4f} nats a token to this model")


if __name__ == "__main__":
    run_script(main)
