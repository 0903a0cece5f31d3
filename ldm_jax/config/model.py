"""The `[model]` section of a config."""

import enum
from dataclasses import dataclass

import jax.numpy as jnp

from ldm_jax.options import check, check_at_least, check_option_types


class ComputeType(enum.StrEnum):
    """The type of activations and matmuls. Parameters and depth memories are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Remat(enum.StrEnum):
    """What is saved of a block with backward = remat. block: its input. dots: also its matmuls with parameters."""

    BLOCK = "block"
    DOTS = "dots"


class AttentionImplementation(enum.StrEnum):
    """Implementations of attention.

    xla, cudnn: those of `jax.nn.dot_product_attention`. flash: the device's fused kernel, which does not store the
    scores. local: a token attends only to itself, `v sigmoid(q'k)`; for measurements.
    """

    XLA = "xla"
    CUDNN = "cudnn"
    FLASH = "flash"
    LOCAL = "local"


@dataclass(frozen=True)
class ModelConfig:
    """The transformer."""

    depth: int = 6
    """Number of blocks; each has two sublayers, attention and MLP."""
    width: int = 128
    """D: width of the stream."""
    heads: int = 4
    """H: number of query heads; it must divide the width."""
    kv_heads: int | None = None
    """J: number of key-value heads; it must divide heads. None: as many as heads."""
    mlp_width: int = 384
    """F: hidden width of the MLP."""
    vocabulary: int = 256
    """S: number of tokens in the vocabulary; 256 for bytes."""
    qk_norm: bool = True
    """RMSNorm on queries and keys."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    tied: bool = True
    """Use the transposed embedding as the output head."""
    scan: bool = True
    """Apply the blocks in one scan, which is compiled once, instead of a Python loop."""
    remat: Remat = Remat.BLOCK
    """With mixer.backward = remat, what is saved. block: each block's input. dots: also matmuls with parameters."""
    compute_dtype: ComputeType = ComputeType.FLOAT32
    """Type of activations and matmuls. Parameters and depth memories are always float32."""
    attention: AttentionImplementation = AttentionImplementation.XLA
    """xla: any device. cudnn: NVIDIA GPUs, with bfloat16. flash: Splash attention on TPUs, cudnn on NVIDIA GPUs, xla
    elsewhere. local: attention is replaced by a token-wise function, to measure the rest of the model."""
    loss_chunk: int = 8192
    """Tokens per device whose logits are held at a time."""

    def __post_init__(self) -> None:
        check_option_types(self)
        check_at_least(self, 1, "depth", "width", "heads", "mlp_width", "vocabulary", "loss_chunk")
        heads, kv_heads = self.heads, self.kv_heads_or_heads
        check(self.width % heads == 0, f"heads is {heads}, which does not divide the width {self.width}.")
        check(self.head_dim % 2 == 0, f"width / heads is {self.head_dim}, but it must be even.")
        check(kv_heads >= 1 and heads % kv_heads == 0, f"kv_heads is {kv_heads}, which does not divide heads {heads}.")
        check(self.rope_base > 1, f"rope_base is {self.rope_base}, but it must be more than 1.")
        check(
            self.attention is not AttentionImplementation.CUDNN or self.compute_dtype is ComputeType.BFLOAT16,
            "attention is cudnn, which does not support float32: set compute_dtype to bfloat16, or attention to xla.",
        )

    @property
    def head_dim(self) -> int:
        """C: width of a head."""
        return self.width // self.heads

    @property
    def kv_heads_or_heads(self) -> int:
        """J: `kv_heads`, or what None stands for."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def sublayers(self) -> int:
        """N: number of sublayers, two for each block."""
        return 2 * self.depth

    @property
    def dtype(self) -> jnp.dtype:
        """The compute type as a JAX type."""
        return jnp.dtype(self.compute_dtype.value)
