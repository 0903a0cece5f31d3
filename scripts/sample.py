"""Prints text from a trained model: `python scripts/sample.py RUN --prompt "def " "class "`."""

import codecs
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import interruptible  # noqa: F401 (first)
import tyro

from ldm_jax.config.command_line import parse, run_script
from ldm_jax.errors import UserError
from ldm_jax.infer import Sampling, complete, load_model, read_prompt


@dataclass(frozen=True)
class Arguments:
    """Prints prompts and their continuations by a trained model. A single one is printed as it is generated."""

    run: tyro.conf.Positional[Path]
    """Directory of the run, for its last checkpoint; RUN@STEP for that of a step. Or that of an exported model or a
    Hugging Face checkpoint."""
    prompt: tuple[str, ...] = ()
    """Prompts, which are computed as one batch. An empty one is the start of a document. Without any prompt or file,
    it is "def "."""
    prompt_file: tuple[Path, ...] = ()
    """UTF-8 text files; - for standard input. Each is one prompt, without one newline at its end."""
    tokens: int = 300
    """Most tokens to generate after each prompt."""
    stop: tuple[str, ...] = ()
    """Strings that end a text; they are left out."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling()
    seed: int = 0
    """Seed of the sampling."""


def main() -> None:
    """Parses the arguments and prints the texts."""
    arguments = parse(Arguments)
    prompts = (*arguments.prompt, *map(read_prompt, arguments.prompt_file)) or ("def ",)
    run = load_model(arguments.run)
    if "" in prompts and run.config.data.separate_documents:
        raise UserError(
            "a prompt is empty, but this run was trained with data.separate_documents, so the model has not learned "
            "how documents start: give a prompt with text."
        )
    try:
        pieces = complete(
            run.graph, run.params, run.tokenizer, prompts, run.config.data.context, arguments.tokens,
            sampling=arguments.sampling, seed=arguments.seed, stop=arguments.stop, start=run.start,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(str(error)) from error
    if len(prompts) == 1:
        sys.stdout.write(prompts[0])
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for (piece,) in pieces:
            sys.stdout.write(decoder.decode(piece))
            sys.stdout.flush()
        sys.stdout.write(decoder.decode(b"", final=True) + "\n")
        return
    texts = [b"".join(parts) for parts in zip(*pieces, strict=True)]
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
        print(f"--- {number}\n{prompt}{text.decode(errors='replace')}")


if __name__ == "__main__":
    run_script(main)
