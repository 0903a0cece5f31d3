"""Plots of a comparison, readable without colour."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ldm_jax.compare.costs import MethodCosts
from ldm_jax.compare.results import MethodResult
from ldm_jax.compare.retrieval import BATCH, Task
from ldm_jax.plots import MARKERS, line_style, save_picture

LOSS = "final validation loss (nats per token)"
STYLES = {"additive": "o:", "delta": "s-.", "rls": "^-", BATCH: "kx"}


def plot_comparison(rows: Sequence[MethodResult], directory: Path) -> list[Path]:
    """Writes `curves.png`, `final_losses.png` and, with costs, `loss_against_compute.png`; returns their paths.

    Methods that diverged are left out. Raises UserError if a plot cannot be written.
    """
    finite = [row for row in rows if np.isfinite(row.loss.mean)]
    if not finite:
        return []
    figures = {"curves": _curves(finite), "final_losses": _final_losses(finite)}
    if with_costs := [row for row in finite if row.costs is not None]:
        figures["loss_against_compute"] = _against_compute(with_costs)
    return [save_picture(figure, directory / f"{name}.png") for name, figure in figures.items()]


def _curves(rows: Sequence[MethodResult]) -> Figure:
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for index, row in enumerate(rows):
        steps = [step for step, _ in row.runs[0].validation_curve]
        losses = np.array([[loss for _, loss in run.validation_curve] for run in row.runs])
        style = line_style(index, markers=True)
        axes.plot(steps, losses.mean(axis=0), style, color=f"C{index}", label=row.method, markersize=4)
        axes.fill_between(steps, losses.min(axis=0), losses.max(axis=0), color=f"C{index}", alpha=0.15, linewidth=0)
    axes.set(xlabel="training step", ylabel="validation loss (nats per token)")
    axes.set_title("Validation loss: mean over seeds; bands span all seeds")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    return figure


def _final_losses(rows: Sequence[MethodResult]) -> Figure:
    figure = Figure(figsize=(9, 1.5 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for position, row in enumerate(rows):
        losses = [run.validation_loss for run in row.runs]
        axes.plot(losses, [position] * len(losses), "|", color="0.45", markersize=14)
        axes.errorbar(row.loss.mean, position, xerr=_half_width(row), fmt="ko", capsize=4)
    axes.set_yticks(range(len(rows)), [row.method for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(LOSS)
    axes.set_title("Final loss: mean over seeds and 95 % Student interval; a dash for each seed")
    axes.grid(alpha=0.3)
    return figure


def _against_compute(rows: Sequence[MethodResult]) -> Figure:
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    costs: dict[str, Callable[[MethodCosts], float]] = {
        "millions of flops a token, of loss and gradient": lambda costs: costs.flops_per_token / 1e6,
        "seconds of a training step, as measured": lambda costs: costs.step_seconds,
    }
    for axes, (label, cost) in zip(panels, costs.items(), strict=True):
        _against(axes, rows, cost)
        axes.set_xlabel(label)
    panels[0].set_ylabel(LOSS)
    figure.suptitle("Loss against the cost of a step, at the same number of tokens; 95 % Student intervals over seeds")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _against(axes: Axes, rows: Sequence[MethodResult], cost: Callable[[MethodCosts], float]) -> None:
    for index, row in enumerate(rows):
        assert row.costs is not None
        style = {"fmt": MARKERS[index % len(MARKERS)], "color": f"C{index}", "capsize": 3, "label": row.method}
        axes.errorbar(cost(row.costs), row.loss.mean, yerr=_half_width(row), **style)
    axes.grid(alpha=0.3)


def _half_width(row: MethodResult) -> float | None:
    return row.loss.half_width if row.loss.seeds > 1 else None


def plot_retrieval(
    correlations: Sequence[float], errors: Mapping[Task, Mapping[str, Sequence[float]]], file: Path
) -> None:
    """Plots the errors against the correlation, a panel for each task, in the file's format. Raises UserError."""
    figure = Figure(figsize=(4.5 * len(errors), 4.5), layout="constrained")
    panels = figure.subplots(1, len(errors), squeeze=False, sharey=True)[0]
    for axes, (task, by_method) in zip(panels, errors.items(), strict=True):
        for method, values in by_method.items():
            axes.plot(correlations, values, STYLES[method], label=method, markersize=8 if method == BATCH else 5)
        axes.set_title(f"{task.layers} layers, keys of width {task.key_dim}, alpha {task.alpha:g}", fontsize=10)
        axes.set_xlabel("key correlation (cosine of two layers' keys)")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("recall error: share of the energy missed")
    panels[0].set_ylim(-0.03, 1.03)
    panels[0].legend()
    figure.suptitle("Recalling a layer's output by its key at the best gain: 0 is perfect recall, 1 is none")
    save_picture(figure, file)
