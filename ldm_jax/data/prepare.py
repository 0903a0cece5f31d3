"""From documents to a prepared corpus, in shards; after a break it goes on from the last whole shard."""

import contextlib
import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ldm_jax.data.documents import DocumentBatch, DocumentSource, FileSource, Position
from ldm_jax.data.hub import HubSource
from ldm_jax.data.preparation_folder import PreparationFolder, Progress
from ldm_jax.data.preparation_line import PreparationLine
from ldm_jax.data.shards import PARTS, Manifest, write_shard
from ldm_jax.data.split import RULE, content_hash, is_validation
from ldm_jax.data.tokenizer import BYTES, ByteTokenizer, Tokenizer, read_tokenizer, text_bytes, token_dtype, train_bpe
from ldm_jax.errors import UserError

BPE = "bpe"


@dataclass(frozen=True)
class PrepareOptions:
    """What a corpus is made of, and how."""

    files: tuple[str, ...] = ()
    """Files, or patterns such as "books/**/*.txt". A row of a .jsonl or .parquet file is a document; any other file is
    one. .gz and .zst are unpacked."""
    dataset: str | None = None
    """Instead of files: a data set of the Hugging Face hub, or a folder that is laid out as one."""
    subset: str | None = None
    """Configuration of the data set."""
    split: str = "train"
    """Split of the data set; training and validation are both taken from it."""
    revision: str | None = None
    """Commit of the data set. With none, what is read on after a break may have changed."""
    column: str = "text"
    """Column with the text."""
    document_bytes: int | None = None
    """Text files are cut, after a line's end, into documents of about this size. None: a file is a document."""
    tokenizer: str = BYTES
    """bytes; bpe, which is trained on the same documents; or the path of a tokenizer.json."""
    vocabulary: int = 8192
    """Tokens of a bpe, at most."""
    sample_bytes: int = 64_000_000
    """Text that a bpe is trained on; no document of the validation part is in it."""
    end_of_document: str | None = None
    """Special token of a tokenizer.json that ends documents. None: <|endoftext|>, </s> or another one known for it."""
    validation_fraction: float = 0.05
    """Part of the documents, chosen by a hash of their content, that is held out."""
    shard_tokens: int = 2**26
    """A shard is written as soon as it has this many, after some 4 MB of text at the least; after a break, at most a
    shard's work is done again."""

    def __post_init__(self) -> None:
        for name, least in (("vocabulary", 257), ("sample_bytes", 1), ("shard_tokens", 1), ("document_bytes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}, but it must be at least {least}.")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is {self.validation_fraction}, but it must lie between 0 and 1.")
        if bool(self.files) == (self.dataset is not None):
            raise ValueError("give either files or a dataset.")

    def source(self) -> DocumentSource:
        """The documents. Raises UserError where there are none."""
        if self.dataset is None:
            return FileSource(self.files, self.column, self.document_bytes)
        return HubSource(self.dataset, self.subset, self.split, self.revision, self.column)

    def make_tokenizer(self, source: DocumentSource) -> Tokenizer:
        """The tokenizer, trained if need be. Raises UserError where it cannot be read."""
        if self.tokenizer == BYTES:
            return ByteTokenizer()
        if self.tokenizer == BPE:
            return train_bpe(self._sample(source), self.vocabulary)
        file = Path(self.tokenizer).expanduser()
        if not file.is_file():
            raise UserError(f"there is no tokenizer {file}: give bytes, bpe, or the path of a tokenizer.json.")
        return read_tokenizer(file, self.end_of_document)

    def _sample(self, source: DocumentSource) -> Iterator[str]:
        left = self.sample_bytes
        for text in source.sample():
            content = text_bytes(text)
            if not is_validation(content_hash(content), self.validation_fraction):
                yield content[:left].decode(errors="ignore")
                left -= len(content)
            if left <= 0:
                return


def prepare(options: PrepareOptions, out: Path, console: Console | None = None) -> None:
    """Writes the corpus to the folder `out`; a preparation that was broken off there goes on, to the same files.

    Raises:
        UserError: a source or a tokenizer that does not serve, a folder that holds something else or cannot be written.
    """
    console = console or Console()
    table = dataclasses.asdict(options)
    with PreparationFolder(out) as folder:
        if (manifest := folder.finished(table)) is not None:
            told = f"{out} is finished, and its files are not looked at again: {_summary(manifest)}"
            console.print(told, highlight=False, soft_wrap=True, markup=False)
            return
        source = options.source()
        progress = folder.open(table, source.fingerprint)
        with folder.writing():
            tokenizer = folder.tokenizer()
            if tokenizer is None:
                if options.tokenizer == BPE:
                    console.print(f"training a BPE on at most {options.sample_bytes:,} bytes", highlight=False)
                tokenizer = options.make_tokenizer(source)
                tokenizer.save(folder.path)
            shards = _Shards(options, folder, tokenizer, progress)
            with PreparationLine(console, progress, source) as line:
                for batch, every in _tokenised(source, tokenizer, progress.position):
                    shards.add(batch, every)
                    line.show(shards.progress, shards.waiting, batch.after)
                shards.close()
        manifest = shards.manifest()
        folder.finish(manifest)
        console.print(f"{out}: {_summary(manifest)}", highlight=False, soft_wrap=True, markup=False)
        if not (manifest.train and manifest.validation):
            console.print(
                "note: a part of the corpus has no document, so nothing can be trained on it. Prepare more text in "
                "another folder, cut files by --document-bytes, or change --validation-fraction.",
                soft_wrap=True,
            )


def _summary(manifest: Manifest) -> str:
    train, validation = (
        f"{manifest.count(part, 'tokens'):,} tokens of {manifest.count(part, 'documents'):,} documents"
        for part in PARTS
    )
    left_out = f", {manifest.empty_documents:,} empty ones left out" if manifest.empty_documents else ""
    strange = f", {manifest.documents_not_utf8:,} are not all UTF-8" if manifest.documents_not_utf8 else ""
    return f"{train} to train on, {validation} held out{left_out}{strange}"


def _tokenised(
    source: DocumentSource, tokenizer: Tokenizer, position: Position
) -> Iterator[tuple[DocumentBatch, list[np.ndarray]]]:
    """Every batch and its tokens. While one is cut into tokens, on all cores, the next one is read."""
    with ThreadPoolExecutor(1) as pool:
        before: tuple[DocumentBatch, Future[list[np.ndarray]]] | None = None
        for batch in source.batches(position):
            current = batch, pool.submit(tokenizer.encode_batch, batch.texts)
            if before is not None:
                yield before[0], before[1].result()
            before = current
        if before is not None:
            yield before[0], before[1].result()


class _Shards:
    """Collects documents and writes them when a shard is full."""

    def __init__(self, options: PrepareOptions, folder: PreparationFolder, tokenizer: Tokenizer, progress: Progress):
        self._options, self._folder, self._tokenizer = options, folder, tokenizer
        self.progress = progress
        self._start()

    def _start(self) -> None:
        self.waiting = 0
        """Tokens that are not written yet."""
        self._documents: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
        self._bytes: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._empty = self._not_utf8 = 0
        self._after: Position = None

    def add(self, batch: DocumentBatch, every: list[np.ndarray]) -> None:
        for text, ids in zip(batch.texts, every, strict=True):
            if not len(ids):
                self._empty += 1
                continue
            content = text_bytes(text)
            held_out = is_validation(content_hash(content), self._options.validation_fraction)
            part = "validation" if held_out else "train"
            self._documents[part].append(ids)
            self._bytes[part] += len(content)
            self._not_utf8 += not _is_utf8(text)
            self.waiting += len(ids) + 1
        self._after = batch.after
        if self.waiting >= self._options.shard_tokens:
            self.close()

    def close(self) -> None:
        """Writes the shard, then that it is there."""
        if self._after is None:
            return
        number, dtype = self.progress.shards, token_dtype(self._tokenizer.vocabulary)
        records: dict[str, Any] = {
            part: write_shard(
                self._folder.path, f"{part}-{number:05}", documents, self._tokenizer.end_of_document, dtype,
                self._bytes[part],
            )
            for part, documents in self._documents.items() if documents
        }  # fmt: skip
        self.progress = self.progress.after_shard(records, self._after, self._empty, self._not_utf8)
        self._folder.store(self.progress)
        self._start()

    def manifest(self) -> Manifest:
        return Manifest(
            tokenizer=self._tokenizer.fingerprint,
            vocabulary=self._tokenizer.vocabulary,
            end_of_document=self._tokenizer.end_of_document,
            dtype=str(token_dtype(self._tokenizer.vocabulary)),
            split_rule=RULE,
            validation_fraction=self._options.validation_fraction,
            options=dataclasses.asdict(self._options),
            empty_documents=self.progress.empty_documents,
            documents_not_utf8=self.progress.documents_not_utf8,
            train=self.progress.train,
            validation=self.progress.validation,
        )


def _is_utf8(text: str) -> bool:
    with contextlib.suppress(UnicodeEncodeError):
        text.encode()
        return True
    return False
