"""Pictures of what a depth mixer does, legible in black and white."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import CenteredNorm, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from ldm_jax.config import Config
from ldm_jax.interpret.figures import Figures, reader_names, source_names
from ldm_jax.plots import MEMORY_LABELS, line_style, save_picture


class Names(NamedTuple):
    """Names of the rows and columns of the heat maps."""

    readers: list[str]
    sources: list[str]


def plot_inspection(config: Config, figures: Figures, directory: Path, title: str) -> list[Path]:
    """Draws `contributions.png`, and `contributions_by_group.png` and `memory.png` of a memory. Raises UserError."""
    names = Names(reader_names(config), source_names(config))
    drawn = [save_picture(_contributions(names, figures, title), directory / "contributions.png")]
    if "residual" in figures:
        drawn.append(save_picture(_by_group(names, figures, title), directory / "contributions_by_group.png"))
        drawn.append(save_picture(_memory(names, figures, title), directory / "memory.png"))
    return drawn


def _contributions(names: Names, figures: Figures, title: str) -> Figure:
    signed, absolute = (figures[name].mean(axis=-1) for name in ("contribution", "absolute_contribution"))
    missing = absolute == 0
    negative = bool((signed < 0).any())
    side = _panel_side(names)
    figure = Figure(figsize=((2 * side if negative else side) + 1.5, side), layout="constrained")
    panels = figure.subplots(1, 2 if negative else 1, squeeze=False, sharey=True)[0]
    image = _heat_map(panels[0], names, absolute, missing, PowerNorm(0.5, 0, absolute.max()), "Greys")
    panels[0].set_title("mean of the absolute weight" if negative else "mean weight")
    panels[0].set_ylabel("reader")
    figure.colorbar(image, ax=panels[0], shrink=0.7, label="weight (square-root shades)")
    if negative:
        image = _heat_map(panels[1], names, signed, missing, CenteredNorm(0, np.abs(signed).max()), "RdBu_r")
        panels[1].set_title("mean weight; - marks negative ones")
        figure.colorbar(image, ax=panels[1], shrink=0.7, label="weight (linear shades)")
    figure.suptitle(f"What every earlier output contributes to every read (hatched: no such pair)\n{title}")
    return figure


def _by_group(names: Names, figures: Figures, title: str) -> Figure:
    absolute = figures["absolute_contribution"]
    groups = absolute.shape[-1]
    columns = min(groups, 4)
    rows = -(-groups // columns)
    side, scale = _panel_side(names), PowerNorm(0.5, 0, absolute.max())
    figure = Figure(figsize=(0.8 * side * columns + 1.5, 0.8 * side * rows + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for group, panel in enumerate(panels.ravel()):
        if group < groups:
            missing = absolute.mean(axis=-1) == 0
            _heat_map(panel, names, absolute[..., group], missing, scale, "Greys")
            panel.set_title(f"group {group}")
        else:
            panel.set_axis_off()
        panel.label_outer()
    for panel in panels[:, 0]:
        panel.set_ylabel("reader")
    shades = ScalarMappable(scale, "Greys")
    figure.colorbar(shades, ax=panels, shrink=0.7, label="mean absolute weight (square-root shades)")
    figure.suptitle(f"What every earlier output contributes to every read, by group (hatched: no such pair)\n{title}")
    return figure


def _panel_side(names: Names) -> float:
    """Inches of a heat map whose labels are legible."""
    return max(5.0, 0.2 * len(names.readers) + 1.5)


def _heat_map(
    axes: Axes, names: Names, weights: np.ndarray, missing: np.ndarray, scale: Normalize, colours: str
) -> AxesImage:
    axes.patch.set(hatch="////", edgecolor="0.8", facecolor="white")
    image = axes.imshow(np.ma.masked_array(weights, missing), cmap=colours, norm=scale)
    for reader, source in np.argwhere(weights < 0):
        dark = abs(weights[reader, source]) > np.abs(weights).max() / 2
        axes.text(source, reader, "-", ha="center", va="center", color="white" if dark else "black")
    axes.set_yticks(range(len(names.readers)), names.readers, fontsize=9)
    axes.set_xticks(range(len(names.sources)), names.sources, fontsize=9, rotation=90)
    axes.set_xlabel("source")
    return image


_LABELS = MEMORY_LABELS | {
    "residual": "|v - M k| / |v| in the final memory, rms (1: nothing is recalled)",
    "stream_rms": "root mean square of the stream",
}


def _memory(names: Names, figures: Figures, title: str) -> Figure:
    figure = Figure(figsize=(20, 8.5), layout="constrained")
    above, below = figure.subplots(2, 4)
    by_group = figures | {"stream_rms": figures["stream_rms"][:, None]}
    for axes, name in zip(above, ("gain", "gate", "log10_condition", "stream_rms"), strict=True):
        _by_depth(axes, by_group[name], names.readers, _LABELS[name], "read by")
    for axes, name in zip(below, ("importance", "forgetting", "residual"), strict=False):
        # The embedding is written first and forgets nothing: its 1 would flatten the others.
        first = int(name == "forgetting" and names.sources[0] == "embedding")
        _by_depth(axes, by_group[name][first:], names.sources[first:], _LABELS[name], "written by")
    below[2].axhline(1, color="black", linewidth=1)
    below[3].set_axis_off()
    below[3].legend(*above[0].get_legend_handles_labels(), loc="upper left")
    figure.suptitle(f"The depth memory by depth, means over tokens\n{title}")
    return figure


def _by_depth(axes: Axes, values: np.ndarray, names: Sequence[str], title: str, xlabel: str) -> None:
    for group, line in enumerate(values.T):
        axes.plot(line, line_style(group, markers=True), markersize=4, label=f"group {group}")
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set_xlabel(xlabel)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
