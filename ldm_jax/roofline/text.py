"""Print the costs of a program on a pod, or of the best meshes for it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ldm_jax.config import Config
from ldm_jax.parallel import slices_of
from ldm_jax.roofline.bounds import ProgramCosts
from ldm_jax.roofline.chips import chip_rates
from ldm_jax.roofline.mesh_search import ranked_meshes

COMPILED = 6
"""How many meshes a search compiles."""
Costs = Callable[[Config, list[Any]], ProgramCosts]
"""Such as `train_step_costs`."""


def print_costs(title: str, config: Config, devices: list[Any], costs: Costs) -> bool:
    """Prints the costs of one program. Returns whether it fits."""
    found = costs(config, devices)
    gib = lambda size: f"{size / 2**30:.2f}"  # noqa: E731
    rates, mesh = found.rates, " x ".join(f"{name} {size}" for name, size in found.mesh.items())
    print(f"{title}: {len(devices)} chips ({found.chip}), mesh {mesh}")
    if found.out_of_memory is not None:
        print(f"does not fit: {found.out_of_memory}")
        return False
    print(
        f"memory per chip    {gib(found.peak_bytes)} GiB at the peak, of {rates.hbm_capacity / 2**30:.0f} "
        f"(arguments {gib(found.argument_bytes)}; temporaries {gib(found.temporary_bytes)}, not all live at once)"
    )
    print(
        f"matmuls            {found.matmul_flops / 1e12:.3g} Tflop, of them model flops {found.model_flops / 1e12:.3g}"
    )
    print(f"HBM bytes          {found.hbm_bytes / 1e9:.3g} GB")
    kinds = ", ".join(f"{kind} {size / 1e9:.3g}" for kind, size in sorted(found.collective_bytes.items()))
    print(f"collectives        {found.sent_bytes / 1e9:.3g} GB sent" + (f" ({kinds})" if kinds else ""))
    bounds = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in found.bounds.items())
    name, seconds = found.longest_bound
    print(f"step time          at least {seconds * 1e3:.3g} ms, bound by {name} (ms: {bounds})")
    print(f"model flops        at most {found.utilisation_bound:.1%} of the chip's peak")
    return True


def print_search(title: str, config: Config, devices: list[Any], costs: Costs) -> bool:
    """Compiles the best-ranked meshes and prints those that fit, fastest first. Returns whether any fits."""
    chip = devices[0].device_kind
    candidates = ranked_meshes(config, len(devices), chip_rates(chip), slices_of(devices))
    print(f"{title}: {len(devices)} chips ({chip}), {len(candidates)} meshes; the {COMPILED} with the best estimates:")
    fitting: list[tuple[float, float, str]] = []
    for number, candidate in enumerate(candidates[:COMPILED], 1):
        found = costs(dataclasses.replace(config, mesh=candidate.mesh), devices)
        mesh = ",".join(f"{name}={size}" for name, size in found.mesh.items())
        if found.out_of_memory is not None:
            print(f"  {number} {mesh} does not fit: {found.out_of_memory.splitlines()[0]}", flush=True)
            continue
        name, seconds = found.longest_bound
        line = (
            f"{mesh}  {seconds * 1e3:8.3g} ms by {name:<11} {found.utilisation_bound:6.1%} of peak  "
            f"{found.peak_bytes / 2**30:6.2f} GiB  {found.sent_bytes / 1e9:.3g} GB sent"
        )
        fitting.append((seconds, found.sent_bytes, line))
        print(f"  {number} {line}", flush=True)
    if not fitting:
        print(f"none of them fits; {len(candidates[COMPILED:])} with larger estimates were not compiled.")
        return False
    print("those that fit, by step time, then by bytes sent:")
    for _, _, line in sorted(fitting):
        print(f"  {line}")
    return True
