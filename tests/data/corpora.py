"""Texts, and corpora that are prepared from them."""

import io
import json

from rich.console import Console

from ldm_jax.data.prepare import PrepareOptions, prepare


def words(rng, documents, longest=60):
    """Documents of words, some beyond ASCII; no two are the same."""
    lexicon = ["the", "cat", "sat", "größer", "→", "naïve", "\n", "0", "def", "return", "日本"]
    return [f"{index} " + " ".join(rng.choice(lexicon, size=rng.integers(1, longest))) for index in range(documents)]


def write_lines(file, texts, column="text"):
    file.write_text("".join(json.dumps({"id": index, column: text}) + "\n" for index, text in enumerate(texts)))
    return file


def prepared(out, *files, **options):
    """What preparing them prints."""
    text = io.StringIO()
    options = {"validation_fraction": 0.2, "shard_tokens": 2000} | options
    prepare(PrepareOptions(tuple(map(str, files)), **options), out, Console(file=text, width=300))
    return text.getvalue()


def contents(folder):
    """Every file but the lock, by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != ".lock"}
