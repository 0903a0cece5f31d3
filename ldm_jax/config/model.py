"""Options of the transformer."""

import enum
from dataclasses import dataclass

import jax.numpy as jnp

from ldm_jax.options import check, check_at_least, check_option_types


class ComputeType(enum.StrEnum):
    """The type that activations and matrix products have. Parameters and depth memories are float32 in any case."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Remat(enum.StrEnum):
    """What a recomputed block computes again. block: all but its input. dots: all but its products with parameters."""

    BLOCK = "block"
    DOTS = "dots"


class AttentionImplementation(enum.StrEnum):
    """xla, cudnn: of `jax.nn.dot_product_attention`. flash: the device's own kernel, which never holds the scores.
    local: a token sees itself alone, `v sigmoid(q'k)`; to measure."""

    XLA = "xla"
    CUDNN = "cudnn"
    FLASH = "flash"
    LOCAL = "local"


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
    """xla anywhere, cudnn on NVIDIA GPUs (with bfloat16). flash: Splash attention on TPUs, cudnn on NVIDIA GPUs, xla
    elsewhere. local mixes no tokens: a stand-in to measure the rest."""
    loss_chunk: int = 8192
    """Tokens of a device whose logits exist at a time."""

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
