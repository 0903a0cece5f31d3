"""Curves of runs, drawn from their metrics."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from ldm_jax.errors import UserError
from ldm_jax.train.metrics import read_metrics

LINES = ("-", "--", ":", "-.")


def plot_runs(runs: Sequence[Path], file: Path) -> None:
    """Training and validation loss of runs by tokens seen, in one picture; the file's ending says which format.

    The training loss, one batch a point, is drawn thin; the validation loss is marked. Readable without colour.

    Raises:
        UserError: a folder holds no metrics, or the picture cannot be written.
    """
    matplotlib.use("agg")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for index, run in enumerate(runs):
        rows = read_metrics(run / "metrics.jsonl")
        training = [row for row in rows if "loss" in row]
        if not training:
            raise UserError(f"{run} holds no metrics: give a folder that scripts/train.py has written.")
        tokens_per_step = training[0]["tokens"] / training[0]["step"]
        validation = [row for row in rows if "validation_loss" in row]
        name, colour, line = run.name or str(run), f"C{index}", LINES[index % len(LINES)]
        x = [row["tokens"] for row in training]
        axes.plot(x, [row["loss"] for row in training], line, color=colour, linewidth=0.7, alpha=0.6)
        axes.plot(
            [row["step"] * tokens_per_step for row in validation],
            [row["validation_loss"] for row in validation],
            line,
            marker="osD^v"[index % 5],
            color=colour,
            linewidth=1.8,
            label=f"{name}: validation"
            + (f", {validation[-1]['validation_bits_per_byte']:.3f} bits a byte at the end" if validation else ""),
        )
    axes.set_xlabel("tokens seen")
    axes.set_ylabel("loss (nats a token)")
    axes.set_title("Training loss (thin, one batch a point) and validation loss")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"the picture {file} cannot be written: {error}.") from error
