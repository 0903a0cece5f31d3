"""Trains a model: `python scripts/train.py configs/quickstart.toml [--train.steps 200 ...] [--run DIR]`."""

import sys
from pathlib import Path

import interruptible  # noqa: F401 (first)

from ldm_jax.config.command_line import TrainArguments, parse_over_config, run_script
from ldm_jax.parallel import join
from ldm_jax.train import train


def main() -> None:
    """Parses the command line and trains."""
    arguments = parse_over_config(TrainArguments, sys.argv[1:])
    if (hosts := arguments.hosts) is not None:
        join(hosts)
    train(arguments.config, arguments.run or Path("runs") / arguments.config_file.stem)


if __name__ == "__main__":
    run_script(main, "interrupted: run the same command again to resume from the last checkpoint.")
