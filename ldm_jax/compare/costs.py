"""What a method costs: parameters, flops, compiled memory, step time."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ldm_jax.bench.timing import alternating
from ldm_jax.config import Config
from ldm_jax.data import Batch
from ldm_jax.nn import count_parameters, init_params
from ldm_jax.roofline.compile import compile_gradient, costs, temporary_bytes
from ldm_jax.train.step import make_state, make_train_step

ROUNDS = 10


@dataclass(frozen=True)
class MethodCosts:
    """Of a training step on this machine."""

    parameters: int
    mixer_parameters: int
    flops_per_token: float
    """Of loss and gradient, as the compiler counts them in unrolled blocks; mHC's rounds of Sinkhorn count as one."""
    temporary_bytes: float
    """What loss and gradient of a batch need beside parameters and gradients."""
    step_seconds: float
    """Of a training step; median over rounds in which the methods take turns."""


def measure(configs: Mapping[str, Config], say: Callable[[str], None] = print) -> dict[str, MethodCosts]:
    """The costs of each method. Step times are comparable with each other, not with those of another call."""
    compiled = {}
    for method, config in configs.items():
        say(f"{method}: compiling")
        compiled[method] = _compiled_costs(config)
    say("step times, the methods taking turns")
    rounds = alternating([_stepper(config) for config in configs.values()], ROUNDS)
    return {
        method: MethodCosts(**compiled[method], step_seconds=statistics.median(seconds))
        for method, seconds in zip(configs, rounds, strict=True)
    }


def _compiled_costs(config: Config) -> dict[str, Any]:
    counts = count_parameters(jax.eval_shape(lambda: init_params(config.model, config.mixer, 0)))
    # A loop's body is counted once, so blocks and loss are unrolled. mHC's rounds of Sinkhorn stay a loop.
    model = dataclasses.replace(config.model, scan=False, loss_chunk=config.train.batch_size * config.data.context)
    unrolled = dataclasses.replace(config, model=model)
    flops = costs(compile_gradient(unrolled, None))["flops"]
    tokens = config.train.batch_size * config.data.context
    return {
        "parameters": sum(counts.values()),
        "mixer_parameters": counts["mixer"],
        "flops_per_token": flops / tokens,
        "temporary_bytes": temporary_bytes(config, None),
    }


def _stepper(config: Config) -> Callable[[], Any]:
    step, state = make_train_step(config), make_state(config)
    batch = Batch(np.zeros((config.train.batch_size, config.data.context + 1), np.int32), None)

    def run() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    return run
