"""Plots of a comparison, readable without colour."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ldm_jax.compare.results import MethodResult
from ldm_jax.errors import UserError
from ldm_jax.plots import LINES

MARKERS = "os^vD*PXd<>p"


def plot_comparison(rows: Sequence[MethodResult], directory: Path) -> list[Path]:
    """Writes `curves.png`, `final_losses.png` and, if there are costs, `loss_against_compute.png`.

    Methods that diverged are left out.

    Returns:
        The paths of the plots.

    Raises:
        UserError: a plot cannot be written.
    """
    matplotlib.use("agg")
    finite = [row for row in rows if np.isfinite(row.loss.mean)]
    if not finite:
        return []
    files = [_draw(directory / "curves.png", _curves, finite), _draw(directory / "final_losses.png", _bars, finite)]
    if with_costs := [row for row in finite if row.costs is not None]:
        files.append(_draw(directory / "loss_against_compute.png", _against_compute, with_costs))
    return files


def _draw(file: Path, fill: Callable[[Axes, Sequence[MethodResult]], None], rows: Sequence[MethodResult]) -> Path:
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    fill(axes, rows)
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise UserError(f"the plot {file} cannot be written: {error}.") from error
    return file


def _curves(axes: Axes, rows: Sequence[MethodResult]) -> None:
    for index, row in enumerate(rows):
        steps = [step for step, _ in row.runs[0].validation_curve]
        losses = np.array([[loss for _, loss in run.validation_curve] for run in row.runs])
        style = MARKERS[index % len(MARKERS)] + LINES[index % len(LINES)]
        axes.plot(steps, losses.mean(axis=0), style, color=f"C{index}", label=row.method, markersize=4)
        axes.plot([steps[-1]] * len(losses), losses[:, -1], "_", color=f"C{index}")
        axes.fill_between(steps, losses.min(axis=0), losses.max(axis=0), color=f"C{index}", alpha=0.15, linewidth=0)
    axes.set(xlabel="training step", ylabel="validation loss (nats per token)")
    axes.set_title("Validation loss: mean over seeds; bands span all seeds, dashes mark each seed's end")
    axes.legend()


def _against_compute(axes: Axes, rows: Sequence[MethodResult]) -> None:
    for index, row in enumerate(rows):
        assert row.costs is not None
        spread = row.loss.half_width if row.loss.seeds > 1 else None
        marker = MARKERS[index % len(MARKERS)]
        x = row.costs.flops_per_token / 1e6
        axes.errorbar([x], [row.loss.mean], yerr=spread, marker=marker, color=f"C{index}", capsize=3, label=row.method)
    axes.set_xlabel("flops of a training step (millions a token, without the optimizer)")
    axes.set_ylabel("final validation loss (nats per token)")
    axes.set_title("Loss against compute at the same tokens; 95 % Student intervals over seeds")
    assert isinstance(axes.figure, Figure)
    axes.figure.legend(loc="outside right upper")


def _bars(axes: Axes, rows: Sequence[MethodResult]) -> None:
    worst_first = list(rows)[::-1]
    positions = np.arange(len(worst_first))
    means = np.array([row.loss.mean for row in worst_first])
    spreads = np.array([row.loss.half_width if row.loss.seeds > 1 else 0.0 for row in worst_first])
    axes.barh(positions, means, xerr=spreads, color="0.75", edgecolor="black", capsize=4)
    for position, row in zip(positions, worst_first, strict=True):
        axes.plot([run.validation_loss for run in row.runs], [position] * len(row.runs), "k|", markersize=12)
    axes.set_yticks(positions, [row.method for row in worst_first])
    margin = 0.1 * (means.max() - means.min()) + spreads.max() + 1e-3
    axes.set_xlim(means.min() - margin, means.max() + margin)
    axes.set_xlabel("final validation loss (nats per token); the axis does not start at 0")
    axes.set_title("Final losses: mean, 95 % Student interval, and each seed")
