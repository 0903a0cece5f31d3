"""The config of a run: frozen dataclasses, checked when they are created.

The fields of `Config` are the tables of a TOML config and the sections of the flags (`--section.field`).
"""

from dataclasses import dataclass

from ldm_jax.config.data import Corpus, DataConfig
from ldm_jax.config.log import LogConfig
from ldm_jax.config.mesh import MeshConfig
from ldm_jax.config.model import AttentionImplementation, ComputeType, ModelConfig, Remat
from ldm_jax.config.optimizer import Decay, OptimizerConfig, OptimizerName, Schedule
from ldm_jax.config.train import TrainConfig
from ldm_jax.mixers import MixerConfig
from ldm_jax.options import check, check_option_types

__all__ = [
    "AttentionImplementation",
    "ComputeType",
    "Config",
    "Corpus",
    "DataConfig",
    "Decay",
    "LogConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OptimizerName",
    "Remat",
    "Schedule",
    "TrainConfig",
]


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
        # A token outside the vocabulary would be embedded as NaN. Prepared corpora are checked when they are loaded.
        vocabulary = self.model.vocabulary
        check(
            vocabulary >= 256 or self.data.kind is Corpus.PREPARED,
            f"vocabulary is {vocabulary}, but the tokens are bytes: it must be at least 256.",
        )
