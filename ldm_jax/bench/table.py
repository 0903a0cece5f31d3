"""The rows of a benchmark: printed as a table, saved as JSON, memory drawn against depth."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ldm_jax.files import save_text

_SCALES = {"bytes": ("MiB", 2**-20), "seconds": ("ms", 1e3), "flops": ("GFLOP", 1e-9), "tokens/s": ("tokens/s", 1.0)}


@dataclass(frozen=True)
class Row:
    """One measured figure."""

    what: str
    mixer: str
    backward: str | None
    form: str | None
    key_dim: int | None
    depth: int
    compute_dtype: str
    value: float | None
    """None: the program does not fit the chip."""
    unit: str
    ratio_to_preln: float | None


def print_rows(rows: Iterable[Row], title: str, file: Path | None = None) -> list[Row]:
    """Prints each row as soon as it is measured, and saves the rows so far; returns all rows. Raises UserError."""
    layout = "{:<16} {:<6} {:<10} {:<9} {:>3} {:>5}  {:<8} {:>18} {:>10}"
    print(f"{title}\n")
    print(layout.format("what", "mixer", "backward", "form", "K", "depth", "type", "value", "over PreLN"), flush=True)
    measured = []
    for row in rows:
        measured.append(row)
        unit, scale = _SCALES[row.unit]
        ratio = "" if row.ratio_to_preln is None else f"{row.ratio_to_preln:.2f}"
        value = "does not fit" if row.value is None else f"{row.value * scale:,.2f} {unit}"
        names = row.what, row.mixer, row.backward or "", row.form or "", row.key_dim or "", row.depth
        print(layout.format(*names, row.compute_dtype, value, ratio), flush=True)
        if file is not None:
            save_rows(measured, file)
    return measured


def save_rows(rows: Sequence[Row], file: Path) -> None:
    """Saves the rows as a JSON list of objects. Raises UserError if the file cannot be written."""
    save_text(file, json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")


def plot_memory(rows: Sequence[Row], file: Path) -> None:
    """Draws compiled temporary memory against depth, a line per mixer, form, K and backward mode. Raises UserError."""
    from matplotlib.figure import Figure

    from ldm_jax.plots import line_style, save_picture

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.value is None:
            continue
        name = "PreLN" if row.mixer == "preln" else f"LDM {row.form}, K {row.key_dim}"
        lines.setdefault(f"{name}, {row.backward}", []).append((row.depth, row.value / 2**20))
    for index, (name, points) in enumerate(lines.items()):
        x, y = zip(*points, strict=True)
        axes.plot(x, y, line_style(index, markers=True), color=f"C{index}", label=name)
    axes.set_yscale("log")
    axes.set_xlabel("blocks")
    axes.set_ylabel("compiled temporary memory (MiB)")
    figure.suptitle("Loss and gradient: temporary memory against depth (width 256, 1024 tokens, float32)")
    axes.grid(alpha=0.3, which="both")
    axes.set_xticks(sorted({row.depth for row in rows}))
    figure.legend(loc="outside right center")
    save_picture(figure, file)
