"""The `[data]` section of a config."""

import enum
from dataclasses import dataclass

from ldm_jax.options import check, check_at_least, check_option_types


class Corpus(enum.StrEnum):
    """Sources of text."""

    STDLIB = "stdlib"
    FILES = "files"
    PREPARED = "prepared"


@dataclass(frozen=True)
class DataConfig:
    """The training text and how it is split."""

    corpus: Corpus | None = None
    """stdlib: the source of Python's standard library on this machine. files: the files of path. prepared: corpora.
    None: prepared or files if corpora or path is set, else stdlib."""
    path: str | None = None
    """Files of the corpus, read as bytes: a path or a pattern such as books/*.txt, where ** matches directories."""
    corpora: tuple[str, ...] = ()
    """Directories written by scripts/prepare_data.py; several are mixed."""
    weights: tuple[float, ...] = ()
    """Relative share of the windows from each of corpora, to a percent. Empty: in proportion to their tokens."""
    verify: bool = True
    """Verify the checksums of corpora when loading them. Sizes are always verified."""
    separate_documents: bool = False
    """Tokens attend only to their own document, and positions start again at each document."""
    context: int = 256
    """T: tokens per window."""
    document_bytes: int = 65536
    """Longer files of path are split at line ends into documents of about this many bytes; small corpora into shorter
    ones."""
    validation_fraction: float = 0.05
    """Fraction of the documents held out for validation, chosen by a hash of their content. Corpora have their own."""
    validation_path: str | None = None
    """Validation text, instead of a part of the training text: files, or a directory written by
    scripts/prepare_data.py."""

    def __post_init__(self) -> None:
        check_option_types(self)
        check_at_least(self, 1, "context", "document_bytes")
        fraction = self.validation_fraction
        check(0 < fraction < 1, f"validation_fraction is {fraction}, but it must lie in (0, 1).")
        check(
            self.corpus is not Corpus.FILES or self.path is not None,
            'corpus is files, but there is no path: set data.path, for example to "books/*.txt".',
        )
        check(
            self.corpus is not Corpus.STDLIB or self.path is None,
            f'path is "{self.path}", but corpus is stdlib, which takes no path: set corpus to files, or leave it out.',
        )
        self._check_corpora()

    def _check_corpora(self) -> None:
        check(
            self.corpus is not Corpus.PREPARED or bool(self.corpora),
            'corpus is prepared, but there are no corpora: set data.corpora, for example to ["corpora/books"].',
        )
        check(
            not self.corpora or (self.corpus in (None, Corpus.PREPARED) and self.path is None),
            f"corpora is {self.corpora}, but then path must be left out, and corpus left out or set to prepared.",
        )
        directories, weights = len(self.corpora), len(self.weights)
        check(
            weights in (0, directories),
            f"weights has {weights} numbers for {directories} corpora: give one for each, or none.",
        )
        check(
            len(set(self.corpora)) == directories,
            f"corpora is {self.corpora}, which names a directory twice: name it once, with a higher weight.",
        )
        for weight in self.weights:
            check(0 < weight < float("inf"), f"weights has {weight}, but weights must be positive and finite.")

    @property
    def kind(self) -> Corpus:
        """`corpus`, or what None stands for."""
        if self.corpora:
            return Corpus.PREPARED
        return Corpus.STDLIB if self.path is None else Corpus.FILES
