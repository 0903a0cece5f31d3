"""What all pictures share: line styles that are distinct without colour, labels of figures, saving."""

import tempfile
from pathlib import Path

from matplotlib.figure import Figure

from ldm_jax.errors import UserError
from ldm_jax.files import writing

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


def check_picture(file: Path) -> None:
    """Makes the directory of a later picture. Raises UserError if it cannot be written, or for an unknown format."""
    formats = Figure().canvas.get_supported_filetypes()
    if (suffix := file.suffix.removeprefix(".")) not in formats:
        raise UserError(f"the picture {file} has the ending {suffix!r}, but it must be one of {', '.join(formats)}.")
    with writing(f"the picture {file}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()


def save_picture(figure: Figure, file: Path) -> Path:
    """Saves a picture in the format of its ending, and makes its directory; returns the file. Raises UserError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"the picture {file} cannot be written: {error}.") from error
    return file
