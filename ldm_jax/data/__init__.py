"""Text as arrays of tokens."""

from ldm_jax.data.corpus import END_OF_DOCUMENT, ByteCorpus, corpus_files, load_corpus
from ldm_jax.data.loader import Batch, Data, HeldOut, load_data
from ldm_jax.data.prepared import PreparedCorpus, load_prepared
from ldm_jax.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer, read_tokenizer, train_bpe

__all__ = [
    "END_OF_DOCUMENT",
    "Batch",
    "ByteCorpus",
    "ByteTokenizer",
    "Data",
    "HeldOut",
    "JsonTokenizer",
    "PreparedCorpus",
    "Tokenizer",
    "corpus_files",
    "load_corpus",
    "load_data",
    "load_prepared",
    "load_tokenizer",
    "read_tokenizer",
    "train_bpe",
]
