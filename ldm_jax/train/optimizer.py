"""The optimiser: AdamW with a clipped gradient and a rate that warms up and falls."""

from typing import Any

import jax
import optax

from ldm_jax.config import Schedule, TrainConfig


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """The learning rate by step: from 0 up in `warmup_steps`, then as the schedule says.

    At step 0 the rate is already `1 / warmup_steps` of the highest, so that the first update moves.
    """
    peak, end = config.learning_rate, config.learning_rate * config.final_learning_rate
    warmup = min(config.warmup_steps, config.steps // 2)
    match config.schedule:
        case Schedule.COSINE:
            after = optax.cosine_decay_schedule(peak, max(config.steps - warmup, 1), config.final_learning_rate)
        case Schedule.CONSTANT:
            decay = max(min(round(config.decay_fraction * config.steps), config.steps - warmup), 1)
            after = optax.linear_schedule(peak, end, decay, max(config.steps - warmup - decay, 0))
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup])


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW behind a clip of the gradient's global norm; only matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config),
            config.beta1,
            config.beta2,
            weight_decay=config.weight_decay,
            mask=matrices,
        ),
    )


def matrices(params: Any) -> Any:
    """True for every matrix. By name: a stack of vectors has two axes, too."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)
