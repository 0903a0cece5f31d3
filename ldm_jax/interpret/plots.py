"""Pictures of what a depth mixer does, legible in black and white."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from ldm_jax.config import Config
from ldm_jax.interpret.figures import Figures, reader_names, source_names
from ldm_jax.plots import MEMORY_LABELS, line_style, save_picture


class Names(NamedTuple):
    """Names of the rows and columns of the heat maps."""

    readers: list[str]
    sources: list[str]


def plot_inspection(config: Config, figures: Figures, directory: Path, title: str) -> list[Path]:
    """Writes `contributions.png` and, for a depth memory, `contributions_by_group.png` and `memory.png`.

    Raises:
        UserError: a picture cannot be written.
    """
    names = Names(reader_names(config), source_names(config))
    drawn = [save_picture(_contributions(names, figures, title), directory / "contributions.png")]
    if "residual" in figures:
        drawn.append(save_picture(_by_group(names, figures, title), directory / "contributions_by_group.png"))
        drawn.append(save_picture(_memory(names, figures, title), directory / "memory.png"))
    return drawn


def _contributions(names: Names, figures: Figures, title: str) -> Figure:
    signed, absolute = (figures[name].mean(axis=-1) for name in ("contribution", "absolute_contribution"))
    negative = bool((signed < 0).any())
    figure = Figure(figsize=(15 if negative else 8.5, 7), layout="constrained")
    panels = figure.subplots(1, 2 if negative else 1, squeeze=False)[0]
    _heat_map(panels[0], names, absolute, "absolute weight, mean over tokens and groups" if negative else "mean weight")
    if negative:
        _heat_map(panels[1], names, signed, "weight, mean over tokens and groups; - marks negative ones")
    figure.suptitle(f"What every earlier output contributes to every read\n{title}")
    return figure


def _by_group(names: Names, figures: Figures, title: str) -> Figure:
    absolute = figures["absolute_contribution"]
    groups = absolute.shape[-1]
    columns = min(groups, 4)
    rows = -(-groups // columns)
    figure = Figure(figsize=(5 * columns, 5 * rows), layout="constrained")
    for group, panel in enumerate(figure.subplots(rows, columns, squeeze=False).ravel()):
        if group < groups:
            _heat_map(panel, names, absolute[..., group], f"group {group}: mean absolute weight", size=5)
        else:
            panel.set_axis_off()
    figure.suptitle(f"What every earlier output contributes to every read, by group\n{title}")
    return figure


def _heat_map(axes: Axes, names: Names, weights: np.ndarray, title: str, size: int = 7) -> None:
    sizes = np.abs(weights)
    image = axes.imshow(
        sizes, cmap="Greys", norm=PowerNorm(0.5, 0, sizes.max())
    )  # the root makes small weights visible
    for reader, source in np.argwhere(weights < 0):
        shade = "white" if sizes[reader, source] > sizes.max() / 4 else "black"
        axes.text(source, reader, "-", ha="center", va="center", color=shade, fontsize=size + 4)
    axes.set_yticks(range(len(names.readers)), names.readers, fontsize=size)
    axes.set_xticks(range(len(names.sources)), names.sources, fontsize=size, rotation=90)
    axes.set_ylabel("reader")
    axes.set_xlabel("source")
    axes.set_title(title)
    axes.figure.colorbar(
        image, ax=axes, shrink=0.7, label="weight, without its sign" if (weights < 0).any() else "weight"
    )


_LABELS = MEMORY_LABELS | {
    "residual": "|v - M k| / |v| in the final memory, root mean square",
    "stream_rms": "root mean square of the stream",
}


def _memory(names: Names, figures: Figures, title: str) -> Figure:
    figure = Figure(figsize=(20, 8.5), layout="constrained")
    above, below = figure.subplots(2, 4)
    by_group = figures | {"stream_rms": figures["stream_rms"][:, None]}
    for axes, name in zip(above, ("gain", "gate", "log10_condition", "stream_rms"), strict=True):
        _by_depth(axes, by_group[name], names.readers, _LABELS[name], "read by")
    for axes, name in zip(below, ("importance", "forgetting", "residual"), strict=False):
        _by_depth(axes, by_group[name], names.sources, _LABELS[name], "written by")
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
