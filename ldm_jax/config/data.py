"""The `[data]` section of a config: which text, and how it is cut."""

import enum
from dataclasses import dataclass

from ldm_jax.options import check, check_at_least, check_option_types


class Corpus(enum.StrEnum):
    """Where text comes from."""

    STDLIB = "stdlib"
    FILES = "files"
    PREPARED = "prepared"


@dataclass(frozen=True)
class DataConfig:
    """The text, and how it is cut."""

    corpus: Corpus | None = None
    """stdlib: the source of Python's own standard library on this machine. files: those of path. prepared: corpora.
    None: whichever is given, else stdlib."""
    path: str | None = None
    """Files of the corpus: a path or a pattern such as books/*.txt; ** goes into folders. Read as bytes."""
    corpora: tuple[str, ...] = ()
    """Folders that scripts/prepare_data.py has written; several are mixed."""
    weights: tuple[float, ...] = ()
    """How much of the windows comes from each of corpora, to a percent. Empty: as much as it has tokens."""
    verify: bool = True
    """Compare the checksums of corpora when they are loaded. Sizes are compared in any case."""
    separate_documents: bool = False
    """Tokens attend to their own document alone, and positions start anew with each."""
    context: int = 256
    """T: tokens of a window."""
    document_bytes: int = 65536
    """Longer files of path are cut, after a line's end, into documents of about this size."""
    validation_fraction: float = 0.05
    """Part of the documents, chosen by a hash of their content, that is kept for validation; corpora have their own."""

    def __post_init__(self) -> None:
        check_option_types(self)
        check_at_least(self, 1, "context", "document_bytes")
        fraction = self.validation_fraction
        check(0 < fraction < 1, f"validation_fraction is {fraction}, but it must lie between 0 and 1.")
        check(
            self.corpus is not Corpus.FILES or self.path is not None,
            'corpus is files, but there is no path: set data.path, for example to "books/*.txt".',
        )
        check(
            self.corpus is not Corpus.STDLIB or self.path is None,
            f'path is "{self.path}", but corpus is stdlib, which has none: set data.corpus to files, or leave it out.',
        )
        self._check_corpora()

    def _check_corpora(self) -> None:
        check(
            self.corpus is not Corpus.PREPARED or bool(self.corpora),
            'corpus is prepared, but there are no corpora: set data.corpora, for example to ["corpora/books"].',
        )
        check(
            not self.corpora or (self.corpus in (None, Corpus.PREPARED) and self.path is None),
            "there are corpora, which are prepared: leave data.path out, and data.corpus, too, or set it to prepared.",
        )
        folders, weights = len(self.corpora), len(self.weights)
        check(
            weights in (0, folders), f"weights has {weights} numbers for {folders} corpora: give one for each, or none."
        )
        check(len(set(self.corpora)) == folders, "corpora has a folder twice: give it once, with a higher weight.")
        for weight in self.weights:
            check(0 < weight < float("inf"), f"a weight is {weight}, but weights must be positive and finite.")

    @property
    def kind(self) -> Corpus:
        """Where the text comes from, where `corpus` leaves it open."""
        if self.corpora:
            return Corpus.PREPARED
        return Corpus.STDLIB if self.path is None else Corpus.FILES
