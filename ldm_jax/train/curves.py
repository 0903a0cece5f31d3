"""Training curves of runs, drawn from their metrics.jsonl."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from ldm_jax.errors import UserError
from ldm_jax.nn.block import sublayer_name
from ldm_jax.plots import MEMORY_LABELS, line_style, save_picture
from ldm_jax.train.metrics import read_metrics

Rows = list[dict[str, Any]]


def distinct_names(runs: Sequence[Path]) -> list[str]:
    """The names of the runs' directories, with as many of their parents as make the names distinct."""
    paths = [run.absolute().parts for run in runs]
    lengths = range(1, max(map(len, paths), default=0) + 1)
    every = (["/".join(parts[-length:]) for parts in paths] for length in lengths)
    return next((names for names in every if len(set(names)) == len(set(paths))), [])


def plot_runs(runs: Sequence[Path], names: Sequence[str], file: Path) -> None:
    """Draws loss, gradient norm, learning rate and speed of runs against tokens seen.

    Points are the training losses of batches, the thin line is their running mean, and the line with markers is the
    validation loss. Losses are in nats per token, or in bits per byte if the runs' tokens differ in length. Values that
    are not finite are left out.

    Raises:
        UserError: a run has no metrics, or the picture cannot be written.
    """
    figure = Figure(figsize=(14, 7), layout="constrained")
    grid = figure.add_gridspec(3, 2, width_ratios=(2, 1))
    loss = figure.add_subplot(grid[:, 0])
    others = {
        "grad_norm": (figure.add_subplot(grid[0, 1]), "gradient norm"),
        "learning_rate": (figure.add_subplot(grid[1, 1]), "learning rate"),
        "tokens_per_second": (figure.add_subplot(grid[2, 1]), "tokens a second"),
    }
    rows_of_runs = [_training_rows(run) for run in runs]
    scales = [_bits_per_byte(rows) for rows in rows_of_runs]
    known = [scale for scale in scales if scale is not None]
    in_bits = len(known) == len(runs) and max(known) > 1.001 * min(known)
    for index, (run_name, rows) in enumerate(zip(names, rows_of_runs, strict=True)):
        _plot_losses(loss, run_name, rows, index, known[index] if in_bits else 1.0)
        for name, (axes, _) in others.items():
            tokens, values = _curve(rows, name)
            marker = "o" if len(values) == 1 else ""
            axes.plot(tokens, values, line_style(index), color=f"C{index}", linewidth=0.8, marker=marker)
    for axes, title in [*others.values(), (loss, "training loss (points; running mean thin) and validation loss")]:
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("tokens seen")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
        if not any(len(line.get_xdata()) for line in axes.lines):  # pyright: ignore[reportArgumentType]
            axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", va="center")
            axes.set_xticks([])
    norm = others["grad_norm"][0]
    norm.set_yscale("log")
    norm.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    norm.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    norm.yaxis.set_minor_formatter(NullFormatter())
    loss.set_ylabel("loss (bits per byte)" if in_bits else "loss (nats per token)")
    loss.legend()
    save_picture(figure, file)


def plot_memory(run: Path, name: str, file: Path) -> bool:
    """Draws heat maps of a depth memory's figures by sublayer and step, means over groups.

    Returns False, and draws nothing, if the run logged none. Raises UserError if the picture cannot be written.
    """
    rows = [row for row in read_metrics(run / "metrics.jsonl") if set(MEMORY_LABELS) <= set(row)]
    if not rows:
        return False
    figure = Figure(figsize=(13, 7.5), layout="constrained")
    steps = [row["step"] for row in rows]
    ticks = sorted({0, len(steps) // 2, len(steps) - 1})
    *panels, rest = figure.subplots(2, 3, sharey=True).ravel()
    rest.set_axis_off()
    for axes, (key, title) in zip(panels, MEMORY_LABELS.items(), strict=True):
        values = np.array([row[key] for row in rows]).mean(axis=-1).T  # [N, steps]
        limits = {"vmin": 0, "vmax": 1} if key == "gate" else {}
        image = axes.imshow(values, aspect="auto", cmap="Greys", interpolation="nearest", **limits)
        axes.set_xticks(ticks, [f"{steps[tick]:,}" for tick in ticks])
        axes.yaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
        axes.yaxis.set_major_formatter(lambda index, _: sublayer_name(int(index)))
        axes.set_ylim(len(values) - 0.5, -0.5)
        axes.set_xlabel("step")
        axes.set_title(title, fontsize=10)
        figure.colorbar(image, ax=axes)
    figure.suptitle(f"The depth memory of {name}, means over groups")
    save_picture(figure, file)
    return True


def _training_rows(run: Path) -> Rows:
    rows = read_metrics(run / "metrics.jsonl")
    if not any("loss" in row for row in rows):
        raise UserError(f"{run} has no metrics: give the directory of a run of scripts/train.py.")
    return rows


def _curve(rows: Rows, name: str) -> tuple[list[Any], list[Any]]:
    """Tokens seen, and the finite values logged at them."""
    found = [(row["tokens"], row[name]) for row in rows if "tokens" in row and math.isfinite(row.get(name, math.nan))]
    return [tokens for tokens, _ in found], [value for _, value in found]


def _bits_per_byte(rows: Rows) -> float | None:
    """Bits per byte for a loss of 1 nat per token. None: there was no validation yet."""
    both = [row for row in rows if "validation_loss" in row]
    return both[-1]["validation_bits_per_byte"] / both[-1]["validation_loss"] if both else None


def _plot_losses(axes: Axes, name: str, rows: Rows, index: int, scale: float) -> None:
    colour = f"C{index}"
    tokens, losses = _curve(rows, "loss")
    points = {"markersize": 3, "alpha": 0.25} if len(losses) > 20 else {}
    axes.plot(tokens, [scale * loss for loss in losses], ".", color=colour, **points)
    axes.plot(tokens, scale * _running_mean(losses), line_style(index), color=colour, linewidth=0.8)
    label, bits = f"{name}: validation", _curve(rows, "validation_bits_per_byte")[1]
    if bits:
        label += f", {bits[-1]:.3f} bits per byte at the end"
    tokens, losses = _curve(rows, "validation_loss")
    scaled = [scale * loss for loss in losses]
    axes.plot(tokens, scaled, line_style(index, markers=True), color=colour, linewidth=1.8, label=label)


def _running_mean(values: Sequence[float]) -> np.ndarray:
    """The mean of each value and those before it: a twentieth of the curve, at least 5 values."""
    window = max(5, len(values) // 20)
    return np.array([np.mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)])
