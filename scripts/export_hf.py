"""Exports the model of a run to safetensors files: `python scripts/export_hf.py RUN --out DIR`."""

from dataclasses import dataclass
from pathlib import Path

import interruptible  # noqa: F401 (first)
import tyro

from ldm_jax.config.command_line import parse, run_script
from ldm_jax.convert import Format, StoredType, export


@dataclass(frozen=True)
class Arguments:
    """Writes the model of a run as a checkpoint of transformers (preln), or as one that only ldm_jax reads."""

    run: tyro.conf.Positional[Path]
    """Directory of the run, for its last checkpoint; RUN@STEP for that of a step. Or that of an exported model or a
    Hugging Face checkpoint."""
    out: Path
    """The new directory."""
    format: Format | None = None
    """transformers: a Llama, Qwen2 or Qwen3 checkpoint. ldm_jax: any mixer. None: transformers for preln, else
    ldm_jax."""
    dtype: StoredType | None = None
    """Type of the parameters. None: the smallest that holds all of them exactly."""


def main() -> None:
    """Parses the arguments and exports."""
    arguments = parse(Arguments)
    exported = export(arguments.run, arguments.out, format=arguments.format, dtype=arguments.dtype)
    size = sum(file.stat().st_size for file in arguments.out.glob("*.safetensors"))
    head = ", the head by itself, because the embedding is scaled" if exported.untied else ""
    print(f"exported    {arguments.run}, step {exported.step}")
    print(f"model       {arguments.out}: {exported.architecture}, {exported.dtype}, {size / 1e6:,.1f} MB{head}")


if __name__ == "__main__":
    run_script(main)
