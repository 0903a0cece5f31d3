"""Text as arrays of tokens."""

from ldm_jax.data.corpus import END_OF_DOCUMENT, ByteCorpus, corpus_files, load_corpus
from ldm_jax.data.windows import spread_windows, training_batches

__all__ = ["END_OF_DOCUMENT", "ByteCorpus", "corpus_files", "load_corpus", "spread_windows", "training_batches"]
