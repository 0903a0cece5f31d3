"""The optimiser: AdamW or Muon behind a clipped gradient, with a rate that warms up and falls."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from ldm_jax.config import Decay, OptimizerConfig, OptimizerName, Schedule
from ldm_jax.parameters import Declarations, declaration_at

CONSISTENT_RMS = 0.2
"""Muon's updates have the size of AdamW's at the same rate (Liu et al., arXiv 2502.16982)."""


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate by step, counted from 0: from 0 up in `warmup_steps`, then as the schedule says.

    At step 0 the rate is already `1 / warmup_steps` of the highest, so that the first update moves. The last step,
    `steps - 1`, has exactly the final rate. With a `decay_fraction` of 0, the constant schedule does not decay.
    """
    peak, last = config.learning_rate, config.final_learning_rate
    warmup = effective_warmup(config, steps)
    cosine = config.schedule is Schedule.COSINE
    decay_steps = steps - 1 - warmup if cosine else min(round(config.decay_fraction * steps), steps - warmup)
    if cosine or config.decay_fraction > 0:
        decay_steps = max(decay_steps, 1)

    def after(step: Any, /) -> Any:
        if decay_steps == 0:
            return jnp.full_like(step, peak, jnp.float32)
        part = jnp.clip(1 - (steps - 1 - warmup - step) / decay_steps, 0, 1)
        if cosine:
            remaining = (1 + jnp.cos(jnp.pi * part)) / 2
        else:
            remaining = 1 - (part if config.decay is Decay.LINEAR else jnp.sqrt(part))
        return peak * (last + (1 - last) * remaining)

    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup])


def effective_warmup(config: OptimizerConfig, steps: int) -> int:
    """Steps of warm-up in a run of so many steps: at most half of them."""
    return min(config.warmup_steps, steps // 2)


def make_optimizer(config: OptimizerConfig, declared: Declarations) -> optax.GradientTransformation:
    """Updates at a learning rate of 1: the caller multiplies them by the rate of the step.

    The gradient's global norm is clipped first. What decays, and what Muon takes, is declared where a parameter is
    made; the mixer's parameters have a rate and a decay of their own.
    """
    decay = config.weight_decay
    mixer_decay = decay if config.mixer_weight_decay is None else config.mixer_weight_decay
    mixer_rate = optax.scale(config.mixer_learning_rate)
    adamw = lambda decay: optax.adamw(  # noqa: E731
        1.0, config.beta1, config.beta2, weight_decay=decay, mask=lambda params: decays(params, declared)
    )

    def label(path: tuple[Any, ...], _: Any) -> str:
        declaration = declaration_at(path, declared)
        muon = config.name is OptimizerName.MUON and declaration is not None and declaration.muon
        mixer = any(part.key == "mixer" for part in path)
        return ("mixer " if mixer else "") + ("muon" if muon else "adamw")

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.partition(
            {
                "adamw": adamw(decay),
                "muon": _muon(config, decay),
                "mixer adamw": optax.chain(adamw(mixer_decay), mixer_rate),
                "mixer muon": optax.chain(_muon(config, mixer_decay), mixer_rate),
            },
            lambda params: jax.tree_util.tree_map_with_path(label, params),
        ),
    )


def decays(params: Any, declared: Declarations) -> Any:
    """True for every parameter that weight decay applies to."""

    def one(path: tuple[Any, ...], _: Any) -> bool:
        declaration = declaration_at(path, declared)
        return declaration is not None and declaration.decays

    return jax.tree_util.tree_map_with_path(one, params)


def _muon(config: OptimizerConfig, decay: float) -> optax.GradientTransformation:
    return contrib.muon(
        1.0,
        beta=config.muon_beta,
        weight_decay=decay,
        # The last two axes are those of one linear map; a leading one stacks the blocks' maps, each by itself.
        muon_weight_dimension_numbers=lambda params: jax.tree.map(
            lambda leaf: contrib.MuonDimensionNumbers(reduction_axis=leaf.ndim - 2, output_axis=leaf.ndim - 1), params
        ),
        consistent_rms=CONSISTENT_RMS,
    )
