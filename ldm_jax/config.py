"""What can be configured: frozen dataclasses, checked when they are made.

The sections are those of the TOML files in `configs/` and of the flags (`--section.field`).
"""

import enum
from dataclasses import dataclass

import jax.numpy as jnp

from ldm_jax.data_config import Corpus, DataConfig
from ldm_jax.mixers import MixerConfig, check_mixer
from ldm_jax.options import check, check_at_least, check_option_types

__all__ = [
    "AttentionImplementation",
    "ComputeType",
    "Config",
    "Corpus",
    "DataConfig",
    "ModelConfig",
    "Remat",
    "Schedule",
    "TrainConfig",
]


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


class Schedule(enum.StrEnum):
    """How the learning rate moves after the warm-up."""

    COSINE = "cosine"
    CONSTANT = "constant"


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
        check_at_least(self, 1, "depth", "width", "heads", "mlp_width", "vocabulary", "loss_chunk")
        heads, kv_heads = self.heads, self.kv_heads_or_heads
        check(self.width % heads == 0, f"heads is {heads}, which does not divide the width {self.width}.")
        check(self.head_dim % 2 == 0, f"a head has width {self.head_dim} (width / heads), but it must be even.")
        check(kv_heads >= 1 and heads % kv_heads == 0, f"kv_heads is {kv_heads}, which does not divide heads {heads}.")
        check(self.rope_base > 1, f"rope_base is {self.rope_base}, but it must be more than 1.")
        check(
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
        check_at_least(
            self, 1, "steps", "batch_size", "accumulation", "log_every", "validate_every", "validation_windows",
            "checkpoint_every", "keep_checkpoints", "sample_tokens",
        )  # fmt: skip
        check_at_least(self, 0, "seed", "warmup_steps", "weight_decay")
        check(
            self.batch_size % self.accumulation == 0,
            f"accumulation is {self.accumulation}, which does not divide batch_size {self.batch_size}.",
        )
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            check(0 < value < float("inf"), f"{name} is {value}, but it must be positive and finite.")
        for name in ("decay_fraction", "final_learning_rate"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"{name} is {value}, but it must lie in [0, 1].")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            check(0 <= value < 1, f"{name} is {value}, but it must lie in [0, 1).")
        check(bool(self.sample_prompt), 'sample_prompt is empty, but it needs a character, such as "\\n".')
        is_text = not any("\ud800" <= character <= "\udfff" for character in self.sample_prompt)
        check(is_text, f"sample_prompt is {self.sample_prompt!a}, which is not text.")
        check(self.seed < 2**32, f"seed is {self.seed}, but it must be less than 2^32.")


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
        # A token past the vocabulary would be looked up as not-a-number. Prepared corpora are checked when loaded.
        vocabulary = self.model.vocabulary
        check(
            vocabulary >= 256 or self.data.kind is Corpus.PREPARED,
            f"vocabulary is {vocabulary}, but the tokens are bytes: it must be at least 256.",
        )
