"""Documents from data sets of the Hugging Face hub."""

from collections.abc import Callable, Iterator
from typing import Any

from ldm_jax.data.documents import DocumentBatch, Position, in_batches, optional_library, text_of
from ldm_jax.errors import UserError


class HubSource:
    """The rows of a data set of the Hugging Face hub, or of a folder that is laid out as one; read as a stream.

    Raises:
        UserError: it cannot be opened, or the library is missing.
    """

    def __init__(self, name: str, subset: str | None, split: str, revision: str | None, column: str):
        self._name, self._column = name, column
        load = optional_library("datasets").load_dataset

        def stream() -> Any:
            return load(name, subset, split=split, revision=revision, streaming=True)

        self._stream: Callable[[], Any] = stream
        self.fingerprint = f"{name} {subset} {split} {revision}"

    def batches(self, position: Position) -> Iterator[DocumentBatch]:
        """All documents from a state of the stream on."""
        return in_batches(self._documents(position))

    def done(self, position: Position) -> None:
        """A stream does not know its length."""

    def sample(self) -> Iterator[str]:
        """The first documents: to go all over a stream takes as long as to read it."""
        return (text for text, _ in self._documents(None))

    def _documents(self, position: Position) -> Iterator[tuple[str, Position]]:
        try:
            rows = self._stream()
            if position is not None:
                rows.load_state_dict(position)
            for row in rows:
                yield text_of(row, self._column, f"the data set {self._name}"), rows.state_dict()
        except UserError:
            raise
        except Exception as error:  # of a dozen types
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:300].rstrip(".")
            raise UserError(f"the data set {self._name} cannot be read: {why}.") from error
