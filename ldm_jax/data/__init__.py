"""Text as arrays of tokens: corpora, tokenizers, training batches and validation windows."""

from ldm_jax.data.byte_corpus import ByteCorpus, corpus_files, load_byte_corpus
from ldm_jax.data.loader import Batch, Data, ValidationText, ValidationWindows, load_data, load_validation_text
from ldm_jax.data.prepared_corpus import PreparedCorpus, load_prepared
from ldm_jax.data.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    MissingTokenizer,
    Tokenizer,
    load_tokenizer,
    read_tokenizer,
    tokenizer_files,
    tokenizer_from_files,
    train_bpe,
)

__all__ = [
    "Batch",
    "ByteCorpus",
    "ByteTokenizer",
    "Data",
    "JsonTokenizer",
    "MissingTokenizer",
    "PreparedCorpus",
    "Tokenizer",
    "ValidationText",
    "ValidationWindows",
    "corpus_files",
    "load_byte_corpus",
    "load_data",
    "load_prepared",
    "load_tokenizer",
    "load_validation_text",
    "read_tokenizer",
    "tokenizer_files",
    "tokenizer_from_files",
    "train_bpe",
]
