"""Prints text from a trained model: `python scripts/sample.py RUN --prompt "def "`."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from ldm_jax.cli import parse, run_script
from ldm_jax.config import Corpus
from ldm_jax.errors import UserError
from ldm_jax.infer import generate
from ldm_jax.train import load_run


@dataclass(frozen=True)
class Arguments:
    """Prints a prompt and what a trained model makes of it."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    prompt: str = "def "
    """Start of the text."""
    tokens: int = 300
    """Length of what follows."""
    temperature: float = 0.8
    """What scores are divided by before a token is drawn; 0 takes the likeliest token."""
    seed: int = 0
    """Of the draws."""


def main() -> None:
    """Parses and prints."""
    arguments = parse(Arguments)
    run = load_run(arguments.run)
    if run.config.data.kind is Corpus.PREPARED:
        raise UserError(f"{arguments.run} was trained on a prepared corpus, and samples are made of bytes so far.")
    prompt = arguments.prompt.encode(errors="surrogateescape")  # bytes that are no text reach us so
    try:
        text = generate(
            run.graph, run.params, prompt, arguments.tokens, run.config.data.context,
            temperature=arguments.temperature, seed=arguments.seed,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(str(error)) from error
    sys.stdout.write((prompt + text).decode(errors="replace") + "\n")


if __name__ == "__main__":
    run_script(main)
