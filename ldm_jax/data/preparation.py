"""Prepares a corpus: tokenizes documents and writes them in shards. An interrupted preparation can be resumed."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ldm_jax.data.documents import (
    SPLIT_RULE,
    DocumentBatch,
    DocumentSource,
    FileSource,
    HubSource,
    Position,
    content_hash,
    is_validation,
    share_warning,
)
from ldm_jax.data.prepared_corpus import (
    MANIFEST_FILE,
    PARTS,
    PROGRESS_FILE,
    Manifest,
    PreparationProgress,
    ShardRecord,
    TokenizedDocument,
    check_shards,
    read_manifest,
    write_shard,
)
from ldm_jax.data.tokenizer import (
    BYTES,
    DESCRIPTION_FILE,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    read_tokenizer,
    text_bytes,
    token_dtype,
    train_bpe,
)
from ldm_jax.errors import UserError
from ldm_jax.files import acquire_lock, write_atomically
from ldm_jax.options import check
from ldm_jax.progress import PreparationLine

BPE = "bpe"
LOCK_FILE = ".lock"


@dataclass(frozen=True)
class PrepareOptions:
    """The source, tokenizer and split of a corpus."""

    files: tuple[str, ...] = ()
    """Files, or patterns such as "books/**/*.txt". Each row of a .jsonl or .parquet file is a document; any other file
    is one document. .gz and .zst files are decompressed."""
    dataset: str | None = None
    """Instead of files: a data set on the Hugging Face hub, or a local directory with the same layout."""
    subset: str | None = None
    """Configuration of the data set."""
    split: str = "train"
    """Split of the data set; both training and validation documents are taken from it."""
    revision: str | None = None
    """Commit of the data set. None: the newest, which may change between an interruption and its resumption."""
    column: str = "text"
    """Name of the text column."""
    document_bytes: int | None = None
    """Text files are cut at line ends into documents of about this size. None: each file is one document."""
    tokenizer: str = BYTES
    """bytes; bpe, which is trained on the same documents; or the path of a tokenizer.json."""
    vocabulary: int = 8192
    """Largest vocabulary of a bpe."""
    sample_bytes: int = 64_000_000
    """Bytes of text that a bpe is trained on; taken from training documents only."""
    end_of_document: str | None = None
    """Special token that ends documents, for a tokenizer.json. None: <|endoftext|>, </s> or another usual name."""
    validation_fraction: float = 0.05
    """Fraction of the documents that is held out, chosen by a hash of their content. 0: none; 1: all."""
    shard_tokens: int = 2**26
    """A shard is written when it has at least this many tokens and about 4 MB of text. After an interruption, at most
    one shard is computed again."""

    def __post_init__(self) -> None:
        for name, least in (("vocabulary", 257), ("sample_bytes", 1), ("shard_tokens", 1), ("document_bytes", 1)):
            value = getattr(self, name)
            check(value is None or value >= least, f"{name} is {value}, but it must be at least {least}.")
        fraction = self.validation_fraction
        check(0 <= fraction <= 1, f"validation_fraction is {fraction}, but it must lie in [0, 1].")
        check(
            fraction < 1 or self.tokenizer != BPE,
            "validation_fraction is 1, so there is no text to train a bpe on: give the tokenizer.json of the corpus of "
            "the training text.",
        )
        check(bool(self.files) != (self.dataset is not None), "give either files or a dataset.")

    def source(self) -> DocumentSource:
        """The documents. Raises UserError."""
        if self.dataset is None:
            return FileSource(self.files, self.column, self.document_bytes)
        return HubSource(self.dataset, self.subset, self.split, self.revision, self.column)

    def make_tokenizer(self, source: DocumentSource) -> Tokenizer:
        """Reads or trains the tokenizer. Raises UserError."""
        if self.tokenizer == BYTES:
            return ByteTokenizer()
        if self.tokenizer == BPE:
            return train_bpe(self._sample(source), self.vocabulary)
        file = Path(os.path.expanduser(self.tokenizer))
        if not file.is_file():
            raise UserError(f"tokenizer is {file}, which is no file: give bytes, bpe, or the path of a tokenizer.json.")
        return read_tokenizer(file, self.end_of_document)

    def _sample(self, source: DocumentSource) -> Iterator[str]:
        remaining = self.sample_bytes
        for text in source.sample():
            content = text_bytes(text)
            if not is_validation(content_hash(content), self.validation_fraction):
                yield content[:remaining].decode(errors="ignore")
                remaining -= len(content)
            if remaining <= 0:
                return


def prepare(options: PrepareOptions, out: Path, console: Console | None = None) -> None:
    """Writes a corpus to the directory `out`, or resumes an interrupted preparation there; the files are the same.

    Raises:
        UserError: the source or the tokenizer cannot be read, or the directory holds something else or cannot be
            written.
    """
    console = console or Console()
    with PreparationDirectory(out) as directory:
        if (manifest := directory.finished(asdict(options))) is not None:
            line = f"{out} is already finished; its files were not checked: {_summary(manifest)}"
            console.print(line, highlight=False, soft_wrap=True, markup=False)
            return
        source = options.source()
        progress = directory.open(asdict(options), source.fingerprint)
        with directory.writing():
            tokenizer = directory.tokenizer()
            if tokenizer is None:
                if options.tokenizer == BPE:
                    console.print(f"training a BPE on at most {options.sample_bytes:,} bytes", highlight=False)
                tokenizer = options.make_tokenizer(source)
                tokenizer.save(directory.path)
            writer = _ShardWriter(options, directory, tokenizer, progress)
            done = 0.0 if progress.position is None else source.done(progress.position) or 0.0
            with PreparationLine(console, progress.tokens, done) as line:
                for batch, tokens in _tokenize(source, tokenizer, progress.position):
                    writer.add(batch, tokens)
                    total = writer.progress.tokens + writer.tokens
                    line.show(writer.progress.shards, total, source.done(batch.next_position))
                notes = writer.fill_empty_part()
                writer.write()
        manifest = writer.manifest()
        directory.finish(manifest)
        for text in (f"{out}: {_summary(manifest)}", *notes, *_split_notes(manifest)):
            console.print(text, highlight=False, soft_wrap=True, markup=False)


def _summary(manifest: Manifest) -> str:
    train, validation = (
        " in ".join(_counted(manifest.count(part, f"{noun}s"), noun) for noun in ("token", "document"))
        for part in PARTS
    )
    empty = f", {_counted(manifest.empty_documents, 'empty document')} skipped" if manifest.empty_documents else ""
    invalid = f", {manifest.documents_not_utf8:,} not valid UTF-8" if manifest.documents_not_utf8 else ""
    return f"{train} to train on, {validation} held out{empty}{invalid}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)


def _split_notes(manifest: Manifest) -> Iterator[str]:
    """What is unexpected about the split of a new corpus."""
    train, validation = (manifest.count(part, "tokens") for part in PARTS)
    fraction = manifest.validation_fraction
    if fraction in (0, 1):
        return
    if not train:
        yield "note: there is no training text, so this corpus can be evaluated only: prepare more text"
    elif not validation:
        yield (
            "note: nothing is held out, so training needs data.validation_path: prepare more text, or cut files with "
            "--document-bytes"
        )
    elif (warning := share_warning(validation / (train + validation), fraction)) is not None:
        yield f"note: {warning}: prepare more text, or cut files with --document-bytes"


def _tokenize(
    source: DocumentSource, tokenizer: Tokenizer, position: Position
) -> Iterator[tuple[DocumentBatch, list[np.ndarray]]]:
    """Every batch with its tokens. The next batch is read while one is tokenized on all cores."""
    with ThreadPoolExecutor(1) as pool:
        previous: tuple[DocumentBatch, Future[list[np.ndarray]]] | None = None
        for batch in source.batches(position):
            current = batch, pool.submit(tokenizer.encode_batch, batch.texts)
            if previous is not None:
                yield previous[0], previous[1].result()
            previous = current
        if previous is not None:
            yield previous[0], previous[1].result()


class PreparationDirectory:
    """The directory of a corpus during its preparation, locked to one process. A context manager.

    Raises:
        UserError: the directory holds other files, cannot be written, or is used by another process.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock = None

    def __enter__(self) -> "PreparationDirectory":
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            names = {entry.name for entry in self.path.iterdir()}
            foreign = names - {LOCK_FILE, PROGRESS_FILE + ".tmp"}  # those may be left by a process that was killed
            if foreign and not names & {MANIFEST_FILE, PROGRESS_FILE}:
                some = ", ".join(sorted(foreign)[:3])
                raise UserError(f"{self.path} holds other files ({some}) and no corpus: give another --out.")
            if MANIFEST_FILE not in names:  # a finished corpus is only read
                self._lock = acquire_lock(self.path / LOCK_FILE, "preparing", "--out")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            self._lock.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an OSError in its body into a UserError."""
        try:
            yield
        except OSError as error:
            # NumPy's error for a partly written array has no error number.
            why = error.strerror or "a file could be written only in part, perhaps because the disk is full"
            raise UserError(
                f"the directory {self.path} cannot be written: {why}. Its complete shards are kept: fix this, then "
                "rerun the same command to resume."
            ) from error

    def finished(self, options: Mapping[str, Any]) -> Manifest | None:
        """The manifest if the corpus is finished. Raises UserError if it was made with other options."""
        if not (self.path / MANIFEST_FILE).exists():
            return None
        manifest = read_manifest(self.path)
        self._check_options(manifest.options, options)
        with contextlib.suppress(OSError):  # left by a process that was killed between the last two files
            (self.path / PROGRESS_FILE).unlink(missing_ok=True)
        return manifest

    def open(self, options: Mapping[str, Any], source: str) -> PreparationProgress:
        """The state to resume from. A preparation with other options that has no complete shard is replaced.

        Raises:
            UserError: the interrupted preparation has other options, or its source or a shard has changed.
        """
        progress, new = self._read_progress(), PreparationProgress(json.loads(json.dumps(options)), source)
        if progress is None or (progress.shards == 0 and progress != new):
            with self.writing():
                for file in (self.path / DESCRIPTION_FILE, *self.path.glob("*-00000.*.npy*")):
                    file.unlink(missing_ok=True)
            self.store(new)
            return new
        self._check_options(progress.options, options)
        if progress.source != source:
            raise UserError(
                f"the source files of {self.path} have changed since its preparation started: use another directory, "
                "or empty this one."
            )
        check_shards(self.path, progress.train + progress.validation)
        return progress

    def _read_progress(self) -> PreparationProgress | None:
        file = self.path / PROGRESS_FILE
        if not file.exists():
            return None
        try:
            table = json.loads(file.read_text(encoding="utf-8"))
            return PreparationProgress(
                **table | {part: tuple(map(ShardRecord.from_json, table[part])) for part in PARTS}
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} is damaged ({error}): use another directory, or empty this one.") from error

    def _check_options(self, stored: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        for name, value in json.loads(json.dumps(options)).items():
            if stored.get(name) != value:
                raise UserError(
                    f"{self.path} was started with {name} {stored.get(name)}, but {name} is now {value}: give another "
                    "--out, or undo the change."
                )

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that an interrupted preparation has saved. Raises UserError."""
        return load_tokenizer(self.path) if (self.path / DESCRIPTION_FILE).exists() else None

    def store(self, progress: PreparationProgress) -> None:
        """Writes `progress.json`. Raises UserError."""
        with self.writing():
            write_atomically(self.path / PROGRESS_FILE, json.dumps(asdict(progress)) + "\n")

    def finish(self, manifest: Manifest) -> None:
        """Writes `corpus.json`, which marks the corpus as finished. Raises UserError."""
        with self.writing():
            manifest.write(self.path)
            (self.path / PROGRESS_FILE).unlink()


class _ShardWriter:
    """Collects documents and writes a shard when it is full."""

    def __init__(
        self,
        options: PrepareOptions,
        directory: PreparationDirectory,
        tokenizer: Tokenizer,
        progress: PreparationProgress,
    ):
        self._options, self._directory, self._tokenizer = options, directory, tokenizer
        self.progress = progress
        self._start_shard()

    def _start_shard(self) -> None:
        self.tokens = 0
        self._documents: dict[str, list[TokenizedDocument]] = {part: [] for part in PARTS}
        self._empty = self._not_utf8 = 0
        self._next_position: Position = None

    def add(self, batch: DocumentBatch, tokens: list[np.ndarray]) -> None:
        if self.tokens >= self._options.shard_tokens:  # not sooner, so that the last shard can still be changed
            self.write()
        for text, ids in zip(batch.texts, tokens, strict=True):
            if not len(ids):
                self._empty += 1
                continue
            content = text_bytes(text)
            held_out = is_validation(content_hash(content), self._options.validation_fraction)
            part = "validation" if held_out else "train"
            self._documents[part].append(TokenizedDocument(ids, len(content)))
            self._not_utf8 += not _is_utf8(text)
            self.tokens += len(ids) + 1
        self._next_position = batch.next_position

    def fill_empty_part(self) -> list[str]:
        """Moves a document of the last shard, with its copies there, to a part that has none. Returns what to print."""
        fraction = self._options.validation_fraction
        counts = {
            part: sum(shard.documents for shard in getattr(self.progress, part)) + len(self._documents[part])
            for part in PARTS
        }
        for empty, full, share in (("validation", "train", fraction), ("train", "validation", 1 - fraction)):
            documents = self._documents[full]
            if counts[empty] or counts[full] < 2 or not documents or share == 0:
                continue
            wanted = share * (self.progress.tokens + self.tokens)
            nearest = min(range(len(documents)), key=lambda n: abs(len(documents[n].tokens) - wanted))
            chosen = documents[nearest].tokens
            copies = [np.array_equal(document.tokens, chosen) for document in documents]
            if all(copies):
                continue
            for part, moved in ((full, False), (empty, True)):
                self._documents[part] = [each for each, copy in zip(documents, copies, strict=True) if copy == moved]
            return [f"note: the {empty} part would be empty, so {_counted(sum(copies), 'document')} moved to it"]
        return []

    def write(self) -> None:
        """Writes the shard, then the progress that includes it."""
        if self._next_position is None:
            return
        old, end, dtype = self.progress, self._tokenizer.end_of_document, token_dtype(self._tokenizer.vocabulary)
        shards: dict[str, Any] = {part: getattr(old, part) for part in PARTS}
        for part, documents in self._documents.items():
            if documents:
                name = f"{part}-{old.shards:05}"
                shard = write_shard(self._directory.path, name, documents, end, dtype)
                shards[part] = (*shards[part], shard)
        self.progress = replace(
            old,
            position=self._next_position,
            shards=old.shards + 1,
            empty_documents=old.empty_documents + self._empty,
            documents_not_utf8=old.documents_not_utf8 + self._not_utf8,
            **shards,
        )
        self._directory.store(self.progress)
        self._start_shard()

    def manifest(self) -> Manifest:
        return Manifest(
            tokenizer=self._tokenizer.fingerprint,
            vocabulary=self._tokenizer.vocabulary,
            end_of_document=self._tokenizer.end_of_document,
            dtype=str(token_dtype(self._tokenizer.vocabulary)),
            split_rule=SPLIT_RULE,
            validation_fraction=self._options.validation_fraction,
            options=asdict(self._options),
            empty_documents=self.progress.empty_documents,
            documents_not_utf8=self.progress.documents_not_utf8,
            train=self.progress.train,
            validation=self.progress.validation,
        )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
