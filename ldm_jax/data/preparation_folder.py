"""The folder of a corpus while it is prepared: who may write to it, and how far it is."""

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from ldm_jax.data.documents import Position
from ldm_jax.data.shards import MANIFEST_FILE, PARTS, Manifest, ShardRecord, check_files, read_manifest, shard_record
from ldm_jax.data.tokenizer import DESCRIPTION_FILE, Tokenizer, load_tokenizer
from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically

PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class Progress:
    """The shards that are whole, and where the source is read on."""

    options: Mapping[str, Any]
    source: str
    """Fingerprint of the source."""
    position: Position = None
    shards: int = 0
    empty_documents: int = 0
    documents_not_utf8: int = 0
    train: tuple[ShardRecord, ...] = ()
    validation: tuple[ShardRecord, ...] = ()

    def after_shard(
        self, records: Mapping[str, ShardRecord], position: Position, empty: int, not_utf8: int
    ) -> "Progress":
        """With one more shard; `records` has what there is of each part."""
        return replace(
            self,
            position=position,
            shards=self.shards + 1,
            empty_documents=self.empty_documents + empty,
            documents_not_utf8=self.documents_not_utf8 + not_utf8,
            **{part: (*getattr(self, part), record) for part, record in records.items()},
        )


class PreparationFolder:
    """A folder that one process at a time prepares a corpus in. A context manager.

    Raises:
        UserError: it holds other files, cannot be written, or another process is at it.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock = None

    def __enter__(self) -> "PreparationFolder":
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            names = {entry.name for entry in self.path.iterdir()}
            ours = {".lock", PROGRESS_FILE + ".tmp"}  # what a start that was killed can leave
            if names - ours and not names & {MANIFEST_FILE, PROGRESS_FILE}:
                foreign = ", ".join(sorted(names - ours)[:3])
                raise UserError(f"{self.path} holds other files ({foreign}) and no corpus: give another --out.")
            if MANIFEST_FILE not in names:  # what is finished is only read
                self._lock = (self.path / ".lock").open("w")
                self._acquire(self._lock)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def _acquire(self, lock: TextIO) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(f"another process is preparing {self.path}: wait for it, or give another --out.") from None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """What goes wrong with files in here is a UserError."""
        try:
            yield
        except OSError as error:
            # NumPy has no error number for us when a file takes only part of an array.
            why = error.strerror or "a file could be written only in part, perhaps because the disk is full"
            raise UserError(
                f"the folder {self.path} cannot be written: {why}. What is whole in it is kept: when that "
                "is mended, the same command goes on."
            ) from error

    def finished(self, options: Mapping[str, Any]) -> Manifest | None:
        """The corpus, if it is finished. Raises UserError if other options made it."""
        if not (self.path / MANIFEST_FILE).exists():
            return None
        manifest = read_manifest(self.path)
        self._check_options(manifest.options, options)
        with contextlib.suppress(OSError):  # a kill between the last two files
            (self.path / PROGRESS_FILE).unlink(missing_ok=True)
        return manifest

    def open(self, options: Mapping[str, Any], source: str) -> Progress:
        """How far a preparation with these options is. Another one that has no whole shard yet makes way.

        Raises:
            UserError: the one that was begun here has other options, its source has changed since, or a shard has.
        """
        progress, new = self._stored(), Progress(json.loads(json.dumps(options)), source)
        if progress is None or (progress.shards == 0 and progress != new):
            with self.writing():
                for left in (self.path / DESCRIPTION_FILE, *self.path.glob("*-00000.*.npy*")):
                    left.unlink(missing_ok=True)
            self.store(new)
            return new
        self._check_options(progress.options, options)
        if progress.source != source:
            raise UserError(
                f"the files that {self.path} was begun with have changed: start in another folder, or empty this one."
            )
        check_files(self.path, [file for part in PARTS for shard in getattr(progress, part) for file in shard.files])
        return progress

    def _stored(self) -> Progress | None:
        file = self.path / PROGRESS_FILE
        if not file.exists():
            return None
        try:
            table = json.loads(file.read_text(encoding="utf-8"))
            return Progress(**table | {part: tuple(map(shard_record, table[part])) for part in PARTS})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} is damaged ({error}): start in another folder, or empty this one.") from error

    def _check_options(self, stored: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        for name, now in json.loads(json.dumps(options)).items():
            if stored.get(name) != now:
                raise UserError(
                    f"{self.path} was begun with {name} {stored.get(name)}, and it is now {now}: give another --out, "
                    "or take back the change."
                )

    def tokenizer(self) -> Tokenizer | None:
        """The one that was saved here, or None."""
        return load_tokenizer(self.path) if (self.path / DESCRIPTION_FILE).exists() else None

    def store(self, progress: Progress) -> None:
        """Stores how far it is. Raises UserError."""
        with self.writing():
            write_atomically(self.path / PROGRESS_FILE, json.dumps(asdict(progress)) + "\n")

    def finish(self, manifest: Manifest) -> None:
        """Writes the description; from now on the corpus is finished. Raises UserError."""
        with self.writing():
            manifest.write(self.path)
            (self.path / PROGRESS_FILE).unlink()
