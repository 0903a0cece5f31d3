"""Depth mixers: how a sublayer's input is computed from earlier outputs, and how its output is stored.

`README.md` in this directory describes how to add one.
"""

from ldm_jax.memory.writes import Write
from ldm_jax.mixers.attnres_block import AttnResBlockConfig
from ldm_jax.mixers.denseformer import DenseFormerConfig
from ldm_jax.mixers.depth_memory import DepthMemory, DepthMemoryConfig, Form, init_memory
from ldm_jax.mixers.hc import HyperConfig
from ldm_jax.mixers.ldm import LDMConfig, without_reads
from ldm_jax.mixers.mhc import MHCConfig
from ldm_jax.mixers.mixer import Mixer, MixerEnds, MixerLayer, MixerOptions, MixerState, Place, Stack
from ldm_jax.mixers.registry import MIXERS, MixerConfig, MixerKind, make_ends, make_layer

__all__ = [
    "MIXERS",
    "AttnResBlockConfig",
    "DenseFormerConfig",
    "DepthMemory",
    "DepthMemoryConfig",
    "Form",
    "HyperConfig",
    "LDMConfig",
    "MHCConfig",
    "Mixer",
    "MixerConfig",
    "MixerEnds",
    "MixerKind",
    "MixerLayer",
    "MixerOptions",
    "MixerState",
    "Place",
    "Stack",
    "Write",
    "init_memory",
    "make_ends",
    "make_layer",
    "without_reads",
]
