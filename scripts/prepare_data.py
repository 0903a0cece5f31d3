"""Turns text into a corpus to train on: `python scripts/prepare_data.py --files "books/*.txt" --out corpora/books`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ldm_jax.config.command_line import parse, run_script
from ldm_jax.data.prepare import PrepareOptions, prepare


@dataclass(frozen=True)
class Arguments:
    """Cuts documents into tokens and writes them in shards. Broken off, the same command goes on."""

    out: Path
    """Folder of the corpus."""
    options: Annotated[PrepareOptions, tyro.conf.arg(name="")]


def main() -> None:
    """Parses and prepares."""
    arguments = parse(Arguments)
    prepare(arguments.options, arguments.out)


if __name__ == "__main__":
    run_script(main, "interrupted: the same command goes on from the last whole shard.")
