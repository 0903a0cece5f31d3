"""Text as arrays of tokens."""

from ldm_jax.data.corpus import END_OF_DOCUMENT, ByteCorpus, corpus_files, load_corpus
from ldm_jax.data.prepared import PreparedCorpus, load_prepared
from ldm_jax.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer, read_tokenizer, train_bpe
from ldm_jax.data.windows import spread_windows, training_batches

__all__ = [
    "END_OF_DOCUMENT",
    "ByteCorpus",
    "ByteTokenizer",
    "JsonTokenizer",
    "PreparedCorpus",
    "Tokenizer",
    "corpus_files",
    "load_corpus",
    "load_prepared",
    "load_tokenizer",
    "read_tokenizer",
    "spread_windows",
    "train_bpe",
    "training_batches",
]
