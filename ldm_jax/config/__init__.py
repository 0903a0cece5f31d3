"""The config of a run: frozen dataclasses, checked when they are created.

The fields of `Config` are the tables of a TOML config and the sections of the flags (`--section.field`).
"""

import enum
import re
from dataclasses import dataclass

import jax.numpy as jnp

from ldm_jax.mixers import MixerConfig
from ldm_jax.options import check, check_at_least, check_option_types
from ldm_jax.sharding import MeshAxis


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


class AttentionBias(enum.StrEnum):
    """Projections of attention that have a bias. qkv: query, key and value. all: also the output."""

    QKV = "qkv"
    ALL = "all"


@dataclass(frozen=True)
class ModelConfig:
    """The transformer."""

    depth: int = 6
    """Number of blocks; each has two sublayers, attention and MLP."""
    width: int = 128
    """D: width of the stream."""
    heads: int = 4
    """H: number of query heads."""
    kv_heads: int | None = None
    """J: number of key-value heads; it must divide heads. None: as many as heads."""
    head_dim: int | None = None
    """C: width of a head. None: width / heads."""
    mlp_width: int = 384
    """F: hidden width of the MLP."""
    vocabulary: int = 256
    """S: number of tokens in the vocabulary; 256 for bytes."""
    qk_norm: bool = True
    """RMSNorm on queries and keys."""
    attention_bias: AttentionBias | None = None
    """Projections of attention that have a bias. qkv: query, key and value. all: also the output. None: none."""
    norm_eps: float = 1e-6
    """Epsilon of the RMSNorms of blocks, head, queries and keys."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: tuple[float, ...] | None = None
    """Llama 3's scaling of the rotary frequencies: four numbers, factor, low_freq_factor, high_freq_factor and
    original_max_position_embeddings of a config of transformers. None: frequencies are not scaled."""
    scale_embedding: bool = True
    """Multiply the embedding by sqrt(width), so that its entries have size 1 initially."""
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
        check(
            self.head_dim is not None or self.width % heads == 0,
            f"heads is {heads}, which does not divide the width {self.width}: change one of them, or set head_dim.",
        )
        head_dim, name = self.head_dim_or_default, "width / heads" if self.head_dim is None else "head_dim"
        check(head_dim > 0 and head_dim % 2 == 0, f"{name} is {head_dim}, but it must be even.")
        check(kv_heads >= 1 and heads % kv_heads == 0, f"kv_heads is {kv_heads}, which does not divide heads {heads}.")
        check(self.rope_base > 1, f"rope_base is {self.rope_base}, but it must be more than 1.")
        check(0 < self.norm_eps < 1, f"norm_eps is {self.norm_eps}, but it must lie in (0, 1).")
        if (scaling := self.rope_scaling) is not None:
            check(
                len(scaling) == 4 and min(scaling) > 0 and scaling[2] > scaling[1],
                f"rope_scaling is {scaling}, but it must be four positive numbers, of which the third, "
                "high_freq_factor, is larger than the second, low_freq_factor.",
            )
        check(
            self.attention is not AttentionImplementation.CUDNN or self.compute_dtype is ComputeType.BFLOAT16,
            "attention is cudnn, which does not support float32: set compute_dtype to bfloat16, or attention to xla.",
        )

    @property
    def head_dim_or_default(self) -> int:
        """C: `head_dim`, or what None stands for."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

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


class OptimizerName(enum.StrEnum):
    """adamw: AdamW. muon: Muon for the matrices of blocks and mixers, AdamW for the rest."""

    ADAMW = "adamw"
    MUON = "muon"


class Schedule(enum.StrEnum):
    """The learning rate after the warm-up."""

    COSINE = "cosine"
    CONSTANT = "constant"


class Decay(enum.StrEnum):
    """The final decay of the constant schedule: linear, or `1 - sqrt(x)` for the fraction `x` of the decay."""

    LINEAR = "linear"
    SQRT = "sqrt"


class TrainedPart(enum.StrEnum):
    """all: all parameters. mixer: those of the depth mixer; the backbone is frozen."""

    ALL = "all"
    MIXER = "mixer"


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate schedule."""

    name: OptimizerName = OptimizerName.ADAMW
    """adamw, or muon for the matrices of blocks and mixers, and adamw for the rest."""
    train: TrainedPart = TrainedPart.ALL
    """Parameters that are trained: all, or mixer, which freezes the backbone."""
    learning_rate: float = 3e-3
    """Peak learning rate. Muon's updates are scaled to the size of AdamW's."""
    warmup_steps: int = 50
    """Steps of linear warm-up from 0; at most half of the steps."""
    schedule: Schedule = Schedule.COSINE
    """cosine: half a cosine down to the last step. constant: constant, then a decay down to the last step."""
    decay: Decay = Decay.LINEAR
    """Decay of the constant schedule: linear, or sqrt for 1 - sqrt."""
    decay_fraction: float = 0.2
    """Fraction of the steps over which the constant schedule decays at the end. 0: it does not decay."""
    final_learning_rate: float = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    weight_decay: float = 0.1
    """Decoupled weight decay of linear maps and the embedding, multiplied by the learning rate. Biases, scales and
    other coefficients do not decay."""
    mixer_learning_rate: float = 1.0
    """Factor on the learning rate of the mixer's parameters."""
    mixer_weight_decay: float | None = None
    """Weight decay of the mixer's linear maps. None: weight_decay."""
    beta1: float = 0.9
    """AdamW's decay of the mean of gradients."""
    beta2: float = 0.95
    """AdamW's decay of the mean of squared gradients."""
    muon_beta: float = 0.95
    """Muon's momentum."""
    clip_norm: float = 1.0
    """Global norm to which larger gradients are clipped."""
    z_loss: float = 0.0
    """Weight of the squared log-normaliser of the logits that is added to the loss (typically 1e-4)."""
    ema: float = 0.0
    """Decay of a moving average of the parameters, which then is validated, sampled and evaluated. 0: off."""

    def __post_init__(self) -> None:
        check_option_types(self)
        check_at_least(self, 0, "warmup_steps")
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            check(0 < value < float("inf"), f"{name} is {value}, but it must be positive and finite.")
        for name in ("weight_decay", "mixer_learning_rate", "z_loss", "mixer_weight_decay"):
            value = getattr(self, name)
            check(
                value is None or 0 <= value < float("inf"),
                f"{name} is {value}, but it must be finite and not negative.",
            )
        for name in ("decay_fraction", "final_learning_rate"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"{name} is {value}, but it must lie in [0, 1].")
        for name in ("beta1", "beta2", "muon_beta", "ema"):
            value = getattr(self, name)
            check(0 <= value < 1, f"{name} is {value}, but it must lie in [0, 1).")


@dataclass(frozen=True)
class TrainConfig:
    """The training loop."""

    steps: int = 1000
    """Total number of updates. A higher value continues a finished run."""
    batch_size: int = 8
    """B: windows per update."""
    accumulation: int = 1
    """Number of microbatches whose gradients are accumulated; it must divide batch_size."""
    init: str | None = None
    """Run whose parameters a new run starts from, RUN or RUN@STEP, or directory of an exported model. What they lack of
    the mixer starts as in a new model. None: a new model."""
    seed: int = 0
    """Random seed of the initial parameters and of the order of the data."""
    validate_every: int = 200
    """Steps between validations; there is always one after the last step."""
    validation_windows: int = 64
    """Windows per validation, spread evenly over the validation text."""
    checkpoint_every: int = 200
    """Steps between checkpoints; there is always one after the last step."""
    checkpoints: str | None = None
    """Directory of the checkpoints, which may be in a bucket: gs://BUCKET/DIRECTORY (pip install 'ldm_jax[gcs]').
    None: RUN/checkpoints."""
    keep_checkpoints: int = 2
    """Number of latest checkpoints that are kept."""
    keep_every: int | None = None
    """Checkpoints at multiples of this step are never deleted. None: only the latest are kept."""
    spike_deviations: float | None = None
    """Skip updates whose loss is this many standard deviations above its running mean (typically 6). None: only skip
    updates whose loss or gradient is not finite."""
    skips_in_a_row: int = 10
    """Stop the run after this many skipped updates in a row."""
    sample_prompt: str = "def "
    """Prompt of the sample that is printed at the end."""
    sample_tokens: int = 200
    """Number of tokens in that sample."""

    def __post_init__(self) -> None:
        check_option_types(self)
        check_at_least(
            self, 1, "steps", "batch_size", "accumulation", "validate_every", "validation_windows",
            "checkpoint_every", "keep_checkpoints", "skips_in_a_row", "sample_tokens",
        )  # fmt: skip
        check_at_least(self, 0, "seed")
        check(self.steps < 2**31, f"steps is {self.steps}, but it must be less than 2^31.")
        check(
            self.batch_size % self.accumulation == 0,
            f"accumulation is {self.accumulation}, which does not divide batch_size {self.batch_size}.",
        )
        for name in ("keep_every", "spike_deviations"):
            value = getattr(self, name)
            check(value is None or value > 0, f"{name} is {value}, but it must be positive.")
        check(self.init != "", "init is empty, but it must name a run; leave it out to start from a new model.")
        where = self.checkpoints
        check(where != "", "checkpoints is empty, but it must name a directory; leave it out for RUN/checkpoints.")
        check(
            where is None or re.match(r"\w+:/", where) is None or re.match(r"gs://[^/]+/+[^/]", where) is not None,
            f"checkpoints is {where}, but a bucket must be given as gs://BUCKET/DIRECTORY; others are not supported.",
        )
        check(bool(self.sample_prompt), 'sample_prompt is empty, but it must have a character, such as "\\n".')
        is_text = not any("\ud800" <= character <= "\udfff" for character in self.sample_prompt)
        check(is_text, f"sample_prompt is {self.sample_prompt!a}, which is not text.")
        check(self.seed < 2**32, f"seed is {self.seed}, but it must be less than 2^32.")


@dataclass(frozen=True)
class LogConfig:
    """What is logged, and how often."""

    every: int = 10
    """Steps between rows of metrics."""
    memory_every: int = 100
    """Steps between rows of the depth memory's forgetting, gates, gains, importance and conditioning."""
    tensorboard: bool = False
    """Also write TensorBoard event files to RUN/tensorboard; needs the extra `tensorboard`."""
    wandb_project: str | None = None
    """Also log to this project of Weights & Biases; needs the extra `wandb`. None: off."""
    profile_from: int | None = None
    """First step of a jax.profiler trace, written to RUN/profile. None: off."""
    profile_steps: int = 3
    """Number of steps in the trace."""

    def __post_init__(self) -> None:
        check_option_types(self)
        check_at_least(self, 1, "every", "memory_every", "profile_steps")
        check(
            self.profile_from is None or self.profile_from >= 1,
            f"profile_from is {self.profile_from}, but steps are counted from 1.",
        )
        check(self.wandb_project != "", "wandb_project is empty, but it must name a project.")


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices."""

    data: int | None = None
    """Shards the batch; parameters are replicated. None: the most devices that the other axes leave and that divide the
    batch evenly."""
    fsdp: int = 1
    """Shards the batch, and the parameters, which are gathered when they are used."""
    context: int = 1
    """Shards the tokens of a window."""
    tensor: int = 1
    """Shards heads, MLP, vocabulary and the groups of the depth memory."""

    def __post_init__(self) -> None:
        check_option_types(self)
        for name in ("data", "fsdp", "context", "tensor"):
            value = getattr(self, name)
            check(value is None or value >= 1, f"{name} is {value}, but it must be at least 1.")

    def sizes(self, devices: int, batch: int) -> dict[MeshAxis, int]:
        """The size of each axis on so many devices, if `batch` windows are computed at a time.

        If `data` is None, it is the largest that the devices allow and that divides the batch.

        Raises:
            ValueError: the product is not the number of devices, or, if `data` is None, does not divide it.
        """
        others = self.fsdp * self.context * self.tensor
        available = f"{devices} device" + ("s" if devices > 1 else "")
        given = f"fsdp {self.fsdp} x context {self.context} x tensor {self.tensor}"
        if self.data is not None and self.data * others != devices:
            raise ValueError(
                f"the mesh data {self.data} x {given} does not fit {available}: the product must be {devices}."
            )
        if devices % others:
            raise ValueError(f"the mesh {given} does not fit {available}: the product must divide {devices}.")
        room, windows = devices // others, batch // self.fsdp
        data = self.data or max(parts for parts in range(1, room + 1) if room % parts == 0 == windows % parts)
        return dict(zip(MeshAxis, (data, self.fsdp, self.context, self.tensor), strict=True))


@dataclass(frozen=True)
class Config:
    """Everything that defines a run."""

    model: ModelConfig = ModelConfig()
    mixer: MixerConfig = MixerConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    log: LogConfig = LogConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self) -> None:
        check_option_types(self)
        self.mixer.options.check_width(self.model.width)
        check(
            self.optimizer.train is TrainedPart.ALL or self.mixer.kind != "preln",
            "optimizer.train is mixer, but mixer.kind is preln, which has no parameters: set another mixer.kind, or "
            "optimizer.train to all.",
        )
        # A token outside the vocabulary would be embedded as NaN. Prepared corpora are checked when they are loaded.
        vocabulary = self.model.vocabulary
        check(
            vocabulary >= 256 or self.data.kind is Corpus.PREPARED,
            f"vocabulary is {vocabulary}, but the tokens are bytes: it must be at least 256.",
        )
