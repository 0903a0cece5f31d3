"""Draw what a trained depth mixer has learned: `python scripts/inspect_memory.py RUN [--out DIR]`."""

from dataclasses import dataclass
from pathlib import Path

import interruptible  # noqa: F401 (first)
import tyro

from ldm_jax.config.command_line import parse, require_matplotlib, run_script
from ldm_jax.data import load_data
from ldm_jax.errors import UserError
from ldm_jax.infer import load_model


@dataclass(frozen=True)
class Arguments:
    """Measures and draws how much each earlier layer contributes to each read, and the memory's figures by depth."""

    run: tyro.conf.Positional[Path]
    """Directory of a run with ldm, attnres or attnres_block, for its last checkpoint; RUN@STEP for that of a step."""
    out: Path | None = None
    """Directory for the JSON file and the pictures. None: RUN/inspection."""
    windows: int = 64
    """Number of windows, spread evenly over the held-out text."""
    batch_size: int = 8
    """Windows computed at a time."""


def main() -> None:
    """Parses, measures and draws."""
    arguments = parse(Arguments)
    require_matplotlib()
    from ldm_jax.interpret.figures import inspect, save_figures
    from ldm_jax.interpret.plots import plot_inspection

    for name in ("windows", "batch_size"):
        if getattr(arguments, name) < 1:
            raise UserError(f"{name} is {getattr(arguments, name)}, but it must be at least 1.")
    run = load_model(arguments.run)
    windows = load_data(run.config.data, run.config.model.vocabulary).validation_windows(arguments.windows).windows
    figures = inspect(run.config, run.params, windows, arguments.batch_size)
    directory = arguments.out or run.path / "inspection"
    tokens = len(windows.tokens) * run.config.data.context
    title = f"{run.path.name}, step {run.step}, {tokens:,} held-out tokens"
    for file in [save_figures(run.config, figures, directory), *plot_inspection(run.config, figures, directory, title)]:
        print(file)


if __name__ == "__main__":
    run_script(main)
