"""Costs of the methods of a comparison: parameters, flops, compiled memory, step time."""

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ldm_jax.bench.timing import alternating, step_runner
from ldm_jax.compare.runs import config_hash
from ldm_jax.config import Config
from ldm_jax.data import Batch
from ldm_jax.errors import UserError
from ldm_jax.files import save_text
from ldm_jax.nn import count_parameters, init_params
from ldm_jax.roofline.compile import compile_gradient, cost_analysis, temporary_bytes

ROUNDS = 10


@dataclass(frozen=True)
class MethodCosts:
    """Costs of a method's training step on the machine that measured them."""

    config_hash: str
    parameters: int
    mixer_parameters: int
    flops_per_token: float
    """Of loss and gradient, as the compiler counts them for unrolled blocks; it counts mHC's Sinkhorn loop once."""
    temporary_bytes: float
    """Memory that loss and gradient of a batch need beside parameters and gradients."""
    step_seconds: float
    """Median over rounds in which the methods alternate."""


def read_costs(directory: Path) -> dict[str, MethodCosts]:
    """Reads `costs.json` of a comparison; empty if there is no such file. Raises UserError if it cannot be read."""
    file = directory / "costs.json"
    if not file.exists():
        return {}
    try:
        return {method: MethodCosts(**stored) for method, stored in json.loads(file.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({error}): delete it to measure the costs again.") from error


def update_costs(directory: Path, methods: Mapping[str, Config], say: Callable[[str], None] = print) -> None:
    """Measures the costs of all methods and writes `costs.json`, unless it has those of all of them already.

    Step times are comparable with each other, not with those of another measurement.
    """
    stored = read_costs(directory)
    if all(name in stored and stored[name].config_hash == config_hash(methods[name]) for name in methods):
        return
    compiled = {}
    for method, config in methods.items():
        say(f"{method}: compiling, to count flops and memory")
        compiled[method] = _compiled_costs(config)
    say("measuring step times")
    table = {
        method: dataclasses.asdict(MethodCosts(**compiled[method], step_seconds=seconds))
        for method, seconds in zip(methods, timed_steps(list(methods.values()), ROUNDS), strict=True)
    }
    save_text(directory / "costs.json", json.dumps(table, indent=1) + "\n")


def _compiled_costs(config: Config) -> dict[str, Any]:
    counts = count_parameters(jax.eval_shape(lambda: init_params(config.model, config.mixer, 0)))
    tokens = config.train.batch_size * config.data.context
    # The compiler counts a loop's body once, so blocks and loss are unrolled. mHC's Sinkhorn iterations stay a loop.
    model = dataclasses.replace(config.model, scan=False, loss_chunk=tokens)
    flops = cost_analysis(compile_gradient(dataclasses.replace(config, model=model), None))["flops"]
    return {
        "config_hash": config_hash(config),
        "parameters": sum(counts.values()),
        "mixer_parameters": counts["mixer"],
        "flops_per_token": flops / tokens,
        "temporary_bytes": temporary_bytes(config, None),
    }


def timed_steps(configs: Sequence[Config], rounds: int, warm_up: int = 2) -> list[float]:
    """Median seconds of a training step of each config on this machine; the configs alternate."""
    batches = (Batch(np.zeros((each.train.batch_size, each.data.context + 1), np.int32), None) for each in configs)
    steps = [step_runner(config, batch) for config, batch in zip(configs, batches, strict=True)]
    return [statistics.median(seconds) for seconds in alternating(steps, rounds, warm_up)]
