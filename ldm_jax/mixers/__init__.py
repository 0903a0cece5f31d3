"""Depth mixers: what a sublayer is given of all that came before it, and what is kept of its output.

To add one: a file here with its two modules (see `base`) and its options, an entry in `registry`, and a test.
"""

from ldm_jax.mixers.attnres import AttnResBlockConfig
from ldm_jax.mixers.base import MixerEnds, MixerLayer, MixerState
from ldm_jax.mixers.dense import DenseFormerConfig
from ldm_jax.mixers.depth_memory import DepthMemory, init_memory
from ldm_jax.mixers.depth_memory_config import DepthMemoryConfig, Form, Write
from ldm_jax.mixers.hyper import HyperConfig
from ldm_jax.mixers.ldm import LDMConfig, ReadInto, without_reads
from ldm_jax.mixers.memory_form import DualState, MemoryState
from ldm_jax.mixers.mhc import MHCConfig
from ldm_jax.mixers.registry import MixerConfig, MixerKind, Place, check_mixer, make_ends, make_layer

__all__ = [
    "AttnResBlockConfig",
    "DenseFormerConfig",
    "DepthMemory",
    "DepthMemoryConfig",
    "DualState",
    "Form",
    "HyperConfig",
    "LDMConfig",
    "MHCConfig",
    "MemoryState",
    "MixerConfig",
    "MixerEnds",
    "MixerKind",
    "MixerLayer",
    "MixerState",
    "Place",
    "ReadInto",
    "Write",
    "check_mixer",
    "init_memory",
    "make_ends",
    "make_layer",
    "without_reads",
]
