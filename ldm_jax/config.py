"""What can be configured: frozen dataclasses, checked when they are made.

The sections are those of the TOML files in `configs/` and of the flags (`--section.field`).
"""

import enum
from dataclasses import dataclass

import jax.numpy as jnp

from ldm_jax.mixers import MixerConfig, check_mixer
from ldm_jax.options import check_option_types


class ComputeType(enum.StrEnum):
    """The type that activations and matrix products have. Parameters and depth memories are float32 in any case."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Remat(enum.StrEnum):
    """What a recomputed block computes again. block: all but its input. dots: all but its products with parameters."""

    BLOCK = "block"
    DOTS = "dots"


class AttentionImplementation(enum.StrEnum):
    """xla, cudnn: of `jax.nn.dot_product_attention`. local: a token sees itself alone, `v sigmoid(q'k)`; to measure."""

    XLA = "xla"
    CUDNN = "cudnn"
    LOCAL = "local"


class Corpus(enum.StrEnum):
    """Where text comes from."""

    STDLIB = "stdlib"
    FILES = "files"


class Schedule(enum.StrEnum):
    """How the learning rate moves after the warm-up."""

    COSINE = "cosine"
    CONSTANT = "constant"


def _check(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def _check_at_least(config: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _check(value >= least, f"{name} is {value}, but it must be at least {least}.")


@dataclass(frozen=True)
class ModelConfig:
    """The transformer."""

    depth: int = 6
    """Blocks; each has two sublayers, attention and MLP."""
    width: int = 128
    """D: width of the stream."""
    heads: int = 4
    """H: query heads; they divide the width."""
    kv_heads: int | None = None
    """J: key-value heads; they divide the query heads. None: as many as query heads."""
    mlp_width: int = 384
    """F: hidden width of the MLP."""
    vocabulary: int = 256
    """S: number of tokens; 256 for bytes."""
    qk_norm: bool = True
    """RMSNorm on queries and keys."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    tied: bool = True
    """The head is the embedding, transposed."""
    scan: bool = True
    """Apply the blocks by one scan, compiled once, instead of one after the other."""
    remat: Remat = Remat.BLOCK
    """With mixer.backward recomputed, what is computed again. block: all but each block's input. dots: all but products
    with parameters."""
    compute_dtype: ComputeType = ComputeType.FLOAT32
    """Type of activations and products. Parameters and depth memories are float32 in any case."""
    attention: AttentionImplementation = AttentionImplementation.XLA
    """xla anywhere, cudnn on NVIDIA GPUs (with bfloat16). local mixes no tokens: a stand-in to measure the rest."""
    loss_chunk: int = 8192
    """Tokens whose logits exist at a time."""

    def __post_init__(self) -> None:
        check_option_types(self)
        _check_at_least(self, 1, "depth", "width", "heads", "mlp_width", "vocabulary", "loss_chunk")
        heads, kv_heads = self.heads, self.kv_heads_or_heads
        _check(self.width % heads == 0, f"heads is {heads}, which does not divide the width {self.width}.")
        _check(self.head_dim % 2 == 0, f"a head has width {self.head_dim} (width / heads), but it must be even.")
        _check(kv_heads >= 1 and heads % kv_heads == 0, f"kv_heads is {kv_heads}, which does not divide heads {heads}.")
        _check(self.rope_base > 1, f"rope_base is {self.rope_base}, but it must be more than 1.")
        _check(
            self.attention is not AttentionImplementation.CUDNN or self.compute_dtype is ComputeType.BFLOAT16,
            "attention is cudnn, which takes no float32: set compute_dtype to bfloat16, or attention to xla.",
        )

    @property
    def head_dim(self) -> int:
        """C: width of a head."""
        return self.width // self.heads

    @property
    def kv_heads_or_heads(self) -> int:
        """J."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def sublayers(self) -> int:
        """N: two for each block."""
        return 2 * self.depth

    @property
    def dtype(self) -> jnp.dtype:
        """The compute type."""
        return jnp.dtype(self.compute_dtype.value)


@dataclass(frozen=True)
class DataConfig:
    """The text, and how it is cut."""

    corpus: Corpus | None = None
    """stdlib: the source of Python's own standard library on this machine. files: those of path. None: files if there
    is a path, else stdlib."""
    path: str | None = None
    """Files of the corpus: a path or a pattern such as books/*.txt; ** goes into folders. Read as bytes."""
    context: int = 256
    """T: tokens of a window."""
    document_bytes: int = 65536
    """Longer files are cut, after a line's end, into documents of about this size."""
    validation_fraction: float = 0.05
    """Part of the documents, chosen by a hash of their content, that is kept for validation."""

    def __post_init__(self) -> None:
        check_option_types(self)
        _check_at_least(self, 1, "context", "document_bytes")
        fraction = self.validation_fraction
        _check(0 < fraction < 1, f"validation_fraction is {fraction}, but it must lie between 0 and 1.")
        _check(
            self.corpus is not Corpus.FILES or self.path is not None,
            'corpus is files, but there is no path: set data.path, for example to "books/*.txt".',
        )
        _check(
            self.corpus is not Corpus.STDLIB or self.path is None,
            f'path is "{self.path}", but corpus is stdlib, which has none: set data.corpus to files, or leave it out.',
        )


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation."""

    steps: int = 1000
    """Updates in all. Raising it continues a finished run."""
    batch_size: int = 8
    """B: windows of an update."""
    accumulation: int = 1
    """Parts that a batch is computed in, one after the other; they divide the batch size."""
    seed: int = 0
    """Of the parameters and of the order of the data."""
    learning_rate: float = 3e-3
    """The highest rate, at the end of the warm-up."""
    warmup_steps: int = 50
    """Updates over which the rate rises linearly from 0; at most half of the steps."""
    schedule: Schedule = Schedule.COSINE
    """cosine: falls along half a cosine until the last step. constant: stays, then falls linearly."""
    decay_fraction: float = 0.2
    """Part of the steps, the last ones, over which the rate falls; of the constant schedule."""
    final_learning_rate: float = 0.1
    """Where the rate ends, as a fraction of the highest."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices (AdamW); vectors and scalars have none."""
    beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""
    beta2: float = 0.95
    """Decay of AdamW's mean of squared gradients."""
    clip_norm: float = 1.0
    """Longest gradient over all parameters; a longer one is scaled down to it."""
    log_every: int = 10
    """Steps from one line of metrics to the next."""
    validate_every: int = 200
    """Steps from one validation to the next; the last step is followed by one in any case."""
    validation_windows: int = 64
    """Windows of a validation during training, spread evenly over the validation text."""
    checkpoint_every: int = 200
    """Steps from one checkpoint to the next; the last step is followed by one in any case."""
    keep_checkpoints: int = 2
    """Latest checkpoints that are kept."""
    sample_prompt: str = "def "
    """Start of the sample that is printed at the end."""
    sample_tokens: int = 200
    """Length of that sample."""

    def __post_init__(self) -> None:
        check_option_types(self)
        _check_at_least(
            self, 1, "steps", "batch_size", "accumulation", "log_every", "validate_every", "validation_windows",
            "checkpoint_every", "keep_checkpoints", "sample_tokens",
        )  # fmt: skip
        _check_at_least(self, 0, "seed", "warmup_steps", "weight_decay")
        _check(
            self.batch_size % self.accumulation == 0,
            f"accumulation is {self.accumulation}, which does not divide batch_size {self.batch_size}.",
        )
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            _check(0 < value < float("inf"), f"{name} is {value}, but it must be positive and finite.")
        for name in ("decay_fraction", "final_learning_rate"):
            value = getattr(self, name)
            _check(0 <= value <= 1, f"{name} is {value}, but it must lie in [0, 1].")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _check(0 <= value < 1, f"{name} is {value}, but it must lie in [0, 1).")
        _check(bool(self.sample_prompt), 'sample_prompt is empty, but it needs a character, such as "\\n".')
        is_text = not any("\ud800" <= character <= "\udfff" for character in self.sample_prompt)
        _check(is_text, f"sample_prompt is {self.sample_prompt!a}, which is not text.")
        _check(self.seed < 2**32, f"seed is {self.seed}, but it must be less than 2^32.")


@dataclass(frozen=True)
class Config:
    """All of a run."""

    model: ModelConfig = ModelConfig()
    mixer: MixerConfig = MixerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()

    def __post_init__(self) -> None:
        check_option_types(self)
        check_mixer(self.mixer, self.model.width)
        # Text is read as bytes; a token past the vocabulary would be looked up as not-a-number.
        vocabulary = self.model.vocabulary
        _check(vocabulary >= 256, f"vocabulary is {vocabulary}, but the tokens are bytes: it must be at least 256.")
