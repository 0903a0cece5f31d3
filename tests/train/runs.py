"""Runs that take seconds: a tiny model on a tiny corpus."""

import dataclasses
import io

import jax
import numpy as np
from rich.console import Console

from ldm_jax.config import Config, DataConfig, LogConfig, ModelConfig, OptimizerConfig, TrainConfig
from ldm_jax.mixers import LDMConfig, MixerConfig, MixerKind
from ldm_jax.train import train


def make_corpus(directory):
    directory.mkdir()
    for index in range(20):
        (directory / f"{index}.txt").write_text("".join(f"{n} times {index} is {n * index}\n" for n in range(30)))
    return directory / "*.txt"


def tiny(path, **train_options):
    options = {"steps": 6, "batch_size": 4, "validate_every": 3, "checkpoint_every": 2} | train_options
    return Config(
        ModelConfig(depth=2, width=16, heads=2, mlp_width=16),
        MixerConfig(ldm=LDMConfig(groups=2, key_dim=2, latent_dim=4)),
        DataConfig(path=str(path), context=16, validation_fraction=0.2),
        OptimizerConfig(warmup_steps=2),
        TrainConfig(**{"sample_tokens": 5, "validation_windows": 4, **options}),
        LogConfig(every=1, memory_every=3),
    )


def without_memory(config):
    """The same run with PreLN, which compiles in half the time."""
    return dataclasses.replace(config, mixer=MixerConfig(MixerKind.PRELN))


def with_train(config, **options):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **options))


def with_optimizer(config, **options):
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **options))


def quietly(config, path):
    """The final state, and what was printed."""
    text = io.StringIO()
    state = train(config, path, Console(file=text, width=200))
    return state, text.getvalue()


def assert_same_bits(a, b):
    leaves = jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(x, y), a, b))
    assert leaves
    assert all(leaves)
