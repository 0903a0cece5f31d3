"""Texts, and corpora prepared from them."""

import io
import json

from rich.console import Console

from ldm_jax.data.preparation import PrepareOptions, prepare


def words(rng, documents, longest=60):
    """Different documents of words, some of them not ASCII."""
    lexicon = ["the", "cat", "sat", "größer", "→", "naïve", "\n", "0", "def", "return", "日本"]
    return [f"{index} " + " ".join(rng.choice(lexicon, size=rng.integers(1, longest))) for index in range(documents)]


def write_lines(file, texts, column="text"):
    file.write_text("".join(json.dumps({"id": index, column: text}) + "\n" for index, text in enumerate(texts)))
    return file


def prepared(out, *files, **options):
    """Prepares the files; returns the printed text."""
    text = io.StringIO()
    options = {"validation_fraction": 0.2, "shard_tokens": 2000} | options
    prepare(PrepareOptions(tuple(map(str, files)), **options), out, Console(file=text, width=300))
    return text.getvalue()


def contents(directory):
    """The content of every file but the lock."""
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != ".lock"}
