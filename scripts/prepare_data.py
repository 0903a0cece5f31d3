"""Prepares a corpus for training: `python scripts/prepare_data.py --files "books/*.txt" --out corpora/books`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import interruptible  # noqa: F401 (first)
import tyro

from ldm_jax.config.command_line import parse, run_script
from ldm_jax.data.preparation import PrepareOptions, prepare


@dataclass(frozen=True)
class Arguments:
    """Tokenizes documents and writes them in shards. If interrupted, rerun the same command to resume."""

    out: Path
    """Directory of the corpus."""
    options: Annotated[PrepareOptions, tyro.conf.arg(name="")]


def main() -> None:
    """Parses the arguments and prepares the corpus."""
    arguments = parse(Arguments)
    prepare(arguments.options, arguments.out)


if __name__ == "__main__":
    run_script(main, "interrupted: rerun the same command to resume from the last complete shard.")
