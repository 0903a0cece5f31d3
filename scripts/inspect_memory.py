"""Draws what a trained depth mixer has learned: `python scripts/inspect_memory.py RUN [--out DIR]`."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from ldm_jax.config.command_line import parse, require_matplotlib, run_script
from ldm_jax.data import load_data
from ldm_jax.errors import UserError
from ldm_jax.train import load_run


@dataclass(frozen=True)
class Arguments:
    """Writes what every earlier layer contributes to every read, and how the memory fares with depth."""

    run: tyro.conf.Positional[Path]
    """Folder of a run with ldm, attnres or attnres_block."""
    out: Path | None = None
    """Folder for the JSON file and the pictures. None: RUN/inspection."""
    windows: int = 64
    """Windows of one context each, spread evenly over the held-out text."""
    batch_size: int = 8
    """Windows computed at a time."""


def main() -> None:
    """Parses, measures and draws."""
    arguments = parse(Arguments)
    require_matplotlib()
    from ldm_jax.interpret.figures import inspect, write_figures
    from ldm_jax.interpret.plots import plot_inspection

    for name in ("windows", "batch_size"):
        if getattr(arguments, name) < 1:
            raise UserError(f"{name} is {getattr(arguments, name)}, but it must be at least 1.")
    run = load_run(arguments.run)
    windows = load_data(run.config.data, run.config.model.vocabulary).validation_windows(arguments.windows).windows
    figures = inspect(run.config, run.params, windows, arguments.batch_size)
    folder = arguments.out or arguments.run / "inspection"
    tokens = len(windows) * run.config.data.context
    title = f"{arguments.run.name}, step {run.step}, {tokens:,} held-out tokens"
    for file in [write_figures(run.config, figures, folder), *plot_inspection(run.config, figures, folder, title)]:
        print(file)


if __name__ == "__main__":
    run_script(main)
