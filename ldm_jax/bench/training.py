"""Measure the depth memory against PreLN: compiled memory, HBM bytes, step time, compile time, one write."""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ldm_jax.bench.table import Row
from ldm_jax.bench.timing import alternating, step_runner
from ldm_jax.config import AttentionImplementation, ComputeType, Config, DataConfig, ModelConfig, TrainConfig
from ldm_jax.data import Batch
from ldm_jax.memory import Backward, Observation
from ldm_jax.memory.recurrent import MemoryShape, Recurrent
from ldm_jax.mixers import Form, LDMConfig, MixerConfig, MixerKind, Write
from ldm_jax.roofline.compile import Chip, compile_gradient, cost_analysis, temporary_bytes


@dataclass(frozen=True)
class Subject:
    """A mixer and the options that are varied."""

    kind: str
    """One of `MixerKind`."""
    backward: Backward
    form: Form | None = None
    key_dim: int | None = None

    def config(self, size: "Size", depth: int, **model: Any) -> Config:
        """A training config with this mixer at a size and depth; `model` are options of the model."""
        ldm = LDMConfig(groups=8)
        if self.form is not None and self.key_dim is not None:
            ldm = dataclasses.replace(ldm, form=self.form, key_dim=self.key_dim)
        return Config(
            model=ModelConfig(depth=depth, width=size.width, heads=size.width // 64, mlp_width=3 * size.width, **model),
            mixer=MixerConfig(kind=self.kind, backward=self.backward, ldm=ldm),
            data=DataConfig(context=size.tokens // size.batch),
            train=TrainConfig(batch_size=size.batch),
        )

    def row(
        self, what: str, depth: int, value: float | None, unit: str, preln: float | None, dtype: str = "float32"
    ) -> Row:
        """A figure of this mixer, and its ratio to PreLN's."""
        ratio = None if value is None or preln is None else value / preln
        names = str(self.kind), str(self.backward), self.form and str(self.form), self.key_dim
        return Row(what, *names, depth, dtype, value, unit, ratio)


@dataclass(frozen=True)
class Size:
    """Size of the model and of a batch."""

    width: int
    tokens: int
    batch: int


CPU_SIZE = Size(width=256, tokens=1024, batch=4)
TPU_SIZE = Size(width=1024, tokens=4096, batch=1)


def preln(backward: Backward = Backward.REMAT) -> Subject:
    """The reference. PreLN has nothing to reverse, so remat stands for `reversible`."""
    return Subject(MixerKind("preln"), Backward.STORED if backward is Backward.STORED else Backward.REMAT)


def subjects(modes: Sequence[Backward], forms: Sequence[Form], key_dims: Sequence[int]) -> list[Subject]:
    """LDM with every combination of the options."""
    every = itertools.product(key_dims, forms, modes)
    return [Subject(MixerKind("ldm"), backward, form, key_dim) for key_dim, form, backward in every]


def memory_rows(chip: Chip | None, subjects: Sequence[Subject], depths: Sequence[int]) -> Iterator[Row]:
    """Temporary memory of loss and gradient at every depth, and its slope per block between the last two depths.

    `ratio_to_preln` compares with PreLN in mode remat. For a TPU the attention is `local`, a stand-in that reads only
    the token itself.
    """
    size = CPU_SIZE if chip is None else TPU_SIZE
    attention = AttentionImplementation.XLA if chip is None else AttentionImplementation.LOCAL
    reference: dict[int, float | None] = {}
    reference_slope = None
    for subject in [preln(), preln(Backward.STORED), *subjects]:
        found = {}
        for depth in depths:
            config = subject.config(size, depth, attention=attention)
            found[depth] = temporary_bytes(config, chip)
            reference.setdefault(depth, found[depth])
            yield subject.row("temporary_bytes", depth, found[depth], "bytes", reference[depth])
        if len(depths) > 1:
            few, many = depths[-2:]
            fits = found[few] is not None and found[many] is not None
            slope = (found[many] - found[few]) / (many - few) if fits else None
            reference_slope = slope if reference_slope is None else reference_slope
            yield subject.row("slope_per_block", many, slope, "bytes", reference_slope)


def traffic_rows(chip: Chip | None, subjects: Sequence[Subject], dtypes: Sequence[ComputeType]) -> Iterator[Row]:
    """HBM bytes and flops of loss and gradient, per block, on one chip.

    The compiler counts the body of a loop once, so the blocks are unrolled: (4 blocks - 2 blocks) / 2. Attention is
    `local`, a stand-in that reads only the token itself. Prefetching is off, so that every operand counts as HBM bytes.
    """

    def measure(subject: Subject, dtype: ComputeType) -> list[float]:
        options = {"scan": False, "attention": AttentionImplementation.LOCAL, "compute_dtype": dtype}
        few, many = (
            cost_analysis(compile_gradient(subject.config(TPU_SIZE, depth, **options), chip, count_hbm_bytes=True))
            for depth in (2, 4)
        )
        return [(many[name] - few[name]) / 2 for name in ("bytes accessed", "flops")]

    for dtype in dtypes:
        reference = measure(preln(), dtype)
        for subject in [preln(), *subjects]:
            hbm_bytes, flops = reference if subject == preln() else measure(subject, dtype)
            yield subject.row("hbm_bytes", 4, hbm_bytes, "bytes", reference[0], str(dtype))
            yield subject.row("flops", 4, flops, "flops", reference[1], str(dtype))


def step_rows(subjects: Sequence[Subject], depth: int, repetitions: int) -> Iterator[Row]:
    """Median wall time of a training step on this machine; each mixer alternates with PreLN in rounds of its own.

    `ratio_to_preln` compares with PreLN in the same backward mode (remat for `reversible`) in these rounds. The row of
    PreLN is that of the first rounds.
    """
    tokens = np.random.default_rng(0).integers(256, size=(CPU_SIZE.batch, CPU_SIZE.tokens // CPU_SIZE.batch + 1))
    batch = Batch(tokens.astype(np.int32), None)
    references: dict[Subject, Callable[[], Any]] = {}
    for subject in subjects:
        reference = preln(subject.backward)
        new = reference not in references
        if new:
            references[reference] = step_runner(reference.config(CPU_SIZE, depth), batch)
        pair = [references[reference], step_runner(subject.config(CPU_SIZE, depth), batch)]
        reference_time, time = (statistics.median(seconds) for seconds in alternating(pair, repetitions))
        if new:
            yield reference.row("step_seconds", depth, reference_time, "seconds", reference_time)
        yield subject.row("step_seconds", depth, time, "seconds", reference_time)


def compile_rows(subjects: Sequence[Subject], repetitions: int) -> Iterator[Row]:
    """Median seconds to trace and compile loss and gradient for this machine; the depths 12 and 96 alternate.

    The caller must disable JAX's compilation cache.
    """
    reference = {}
    for subject in [preln(), *subjects]:
        configs = {depth: subject.config(CPU_SIZE, depth) for depth in (12, 96)}
        runs = [functools.partial(compile_gradient, config, None) for config in configs.values()]
        for depth, times in zip(configs, alternating(runs, repetitions, warm_up=1), strict=True):
            seconds = statistics.median(times)
            reference.setdefault(depth, seconds)
            yield subject.row("compile_seconds", depth, seconds, "seconds", reference[depth])


def write_rows(key_dims: Sequence[int], repetitions: int) -> Iterator[Row]:
    """Median seconds of one write for 1024 tokens, width 256 and 8 groups, and of a copy of the memory's state."""
    groups, tokens = 8, CPU_SIZE.tokens
    value_dim = CPU_SIZE.width // groups
    rng = np.random.default_rng(0)
    for key_dim in key_dims:
        normal = lambda *shape: jnp.asarray(rng.normal(size=(tokens, groups, *shape)), jnp.float32)  # noqa: E731
        form = Recurrent(Write.RLS.rule, MemoryShape(groups, value_dim, key_dim))
        state = form.start((tokens,), 10.0)._replace(memory=normal(key_dim, value_dim))
        observation = Observation(
            normal(key_dim), normal(value_dim), jnp.full((tokens, groups), 0.98), jnp.ones((tokens, groups))
        )
        one_write = functools.partial(jax.jit(form.write), state, observation)
        one_copy = functools.partial(jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state)), state)
        times = alternating([one_write, one_copy], repetitions)
        for what, each in zip(("write_seconds", "copy_seconds"), times, strict=True):
            seconds = statistics.median(each)
            yield Row(what, "ldm", None, "recurrent", key_dim, 1, "float32", seconds, "seconds", None)
