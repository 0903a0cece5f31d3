"""Imports a Hugging Face checkpoint as a run: `python scripts/import_hf.py HF_DIR --out RUN`."""

import time
from dataclasses import dataclass
from pathlib import Path

import interruptible  # noqa: F401 (first)
import tyro

from ldm_jax.config.command_line import parse, run_script
from ldm_jax.convert import import_hf


@dataclass(frozen=True)
class Arguments:
    """Writes the model of a Hugging Face checkpoint (Llama, Mistral, Qwen2 or Qwen3) as a run at step 0."""

    source: tyro.conf.Positional[Path]
    """Local directory with config.json, model.safetensors or its shards, and tokenizer.json where there is one; such as
    hf download NAME --local-dir DIR makes."""
    out: Path
    """Directory of the run."""
    tokenizer: Path | None = None
    """The model's tokenizer.json. None: that of the source, if it has one."""
    end_of_document: str | None = None
    """Name of the token that ends a document. None: the tokenizer's usual one, else the model's eos_token_id."""
    context: int | None = None
    """Tokens per window. None: the model's max_position_embeddings."""
    corpora: tuple[str, ...] = ()
    """Prepared corpora of the run. None: OUT/corpus."""


def main() -> None:
    """Parses the arguments and imports."""
    arguments = parse(Arguments)
    start = time.perf_counter()
    config = import_hf(
        arguments.source,
        arguments.out,
        tokenizer=arguments.tokenizer,
        end_of_document=arguments.end_of_document,
        context=arguments.context,
        corpora=arguments.corpora,
    )
    seconds = time.perf_counter() - start
    model = config.model
    print(f"imported    {arguments.source}: depth {model.depth}, width {model.width}, vocabulary {model.vocabulary:,}")
    print(f"run         {arguments.out}, context {config.data.context:,}, in {seconds:.1f} s")


if __name__ == "__main__":
    run_script(main)
