"""What all pictures share: line styles that are distinct without colour, labels of figures, saving."""

from pathlib import Path

from matplotlib.figure import Figure

from ldm_jax.errors import UserError

LINES = ("-", "--", ":", "-.")
MARKERS = "os^vD*PXd<>"

MEMORY_LABELS = {
    "forgetting": "forgetting of a write",
    "gain": "read gain",
    "gate": "read gate",
    "importance": "importance of a write",
    "log10_condition": "log10 of P's condition number",
}
"""Of `ldm_jax.infer.MemoryFigures`."""


def line_style(index: int, *, markers: bool = False) -> str:
    """Matplotlib's format of the line with this index."""
    return LINES[index % len(LINES)] + (MARKERS[index % len(MARKERS)] if markers else "")


def save_picture(figure: Figure, file: Path) -> Path:
    """Saves a picture in the format of the file's ending; returns the file.

    Raises:
        UserError: the file cannot be written, or the format is unknown.
    """
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"the picture {file} cannot be written: {error}.") from error
    return file
