"""What a program costs on a pod, in words."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ldm_jax.config import Config, MeshConfig
from ldm_jax.errors import UserError
from ldm_jax.parallel import slices_of
from ldm_jax.roofline.chips import chip_rates
from ldm_jax.roofline.costs import PodCosts
from ldm_jax.roofline.mesh_search import ranked_meshes

COMPILED = 6
"""Meshes of a search that are compiled."""
Costs = Callable[[Config, list[Any]], PodCosts]


def parse_mesh(text: str) -> MeshConfig:
    """The mesh in words such as "data=16,fsdp=16". Raises UserError for anything else."""
    names = [field.name for field in dataclasses.fields(MeshConfig)]
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in names or name in sizes or not size.isdecimal():
            raise UserError(
                f'"{part}" of the mesh "{text}" is not understood: it must be one of {", ".join(names)}, each once, '
                "with a number, such as data=16,fsdp=16."
            )
        sizes[name] = int(size)
    try:
        return MeshConfig(**sizes)
    except ValueError as error:
        raise UserError(str(error)) from error


def check_and_print(title: str, config: Config, devices: list[Any], costs: Costs) -> bool:
    """Prints all that is known of one program. Returns whether it fits."""
    found = costs(config, devices)
    in_gib = lambda size: f"{size / 2**30:.2f}"  # noqa: E731
    rates, mesh = found.rates, " x ".join(f"{name} {size}" for name, size in found.mesh.items())
    print(f"{title}: {len(devices)} chips ({found.kind}), mesh {mesh}")
    if found.refusal is not None:
        print(f"does not fit: {found.refusal}")
        return False
    print(
        f"memory of a chip   {in_gib(found.peak_bytes)} GiB at the peak, of {rates.hbm_capacity / 2**30:.0f} "
        f"(arguments {in_gib(found.argument_bytes)}; temporaries {in_gib(found.temporary_bytes)}, not all at once)"
    )
    print(f"products           {found.flops / 1e12:.3g} Tflop, of which the model needs {found.model_flops / 1e12:.3g}")
    print(f"memory traffic     {found.hbm_bytes / 1e9:.3g} GB")
    sent = ", ".join(f"{kind} {amount / 1e9:.3g}" for kind, amount in sorted(found.sent_bytes.items()))
    print(f"sent to others     {sum(found.sent_bytes.values()) / 1e9:.3g} GB" + (f" ({sent})" if sent else ""))
    bounds = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in found.bounds.items())
    limit, seconds = max(found.bounds.items(), key=lambda each: each[1])
    print(f"a step takes       at least {seconds * 1e3:.3g} ms, bound by {limit} (ms: {bounds})")
    print(f"model flops        at most {found.utilisation_bound:.1%} of the chip's peak")
    return True


def search_and_print(title: str, config: Config, devices: list[Any], costs: Costs) -> bool:
    """Compiles the meshes that a rough count of training ranks first, prints those that fit, the best first.

    Returns whether any does.
    """
    kind = devices[0].device_kind
    candidates = ranked_meshes(config, len(devices), chip_rates(kind), slices_of(devices))
    print(f"{title}: {len(devices)} chips ({kind}), {len(candidates)} meshes; the best {COMPILED} by a rough count")
    fitting: list[tuple[float, float, str]] = []
    refusals: list[str] = []
    for number, candidate in enumerate(candidates[:COMPILED], 1):
        found = costs(dataclasses.replace(config, mesh=candidate.mesh), devices)
        mesh = ",".join(f"{name}={size}" for name, size in found.mesh.items())
        if found.refusal is not None:
            refusals.append(f"{mesh} does not fit: {found.refusal.splitlines()[0]}")
            print(f"  {number} {refusals[-1]}", flush=True)
            continue
        limit, seconds = max(found.bounds.items(), key=lambda each: each[1])
        line = (
            f"{mesh}  {seconds * 1e3:8.3g} ms by {limit:<8} {found.utilisation_bound:6.1%} of peak  "
            f"{found.peak_bytes / 2**30:6.2f} GiB  sent {sum(found.sent_bytes.values()) / 1e9:.3g} GB"
        )
        fitting.append((seconds, sum(found.sent_bytes.values()), line))
        print(f"  {number} {line}", flush=True)
    if not fitting:
        rest = len(candidates[COMPILED:])
        print(f"none of them fits; {rest} that seem larger or slower were not tried.")
        return False
    print("those that fit, by the least time a step takes, then by what it sends:")
    for _, _, line in sorted(fitting):
        print(f"  {line}")
    return True
