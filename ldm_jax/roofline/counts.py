"""Counts in the HLO of a program, for one device and one run: flops of matmuls, HBM bytes, and collectives.

Unlike in the compiler's own counts, the body of a loop counts once per iteration.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ldm_jax.roofline.hlo import Instruction, Program

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_MOVE_NOTHING = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional", "call", "after-all",
    "partition-id", "opt-barrier",
}  # fmt: skip
_ANNOTATIONS = (
    "Sharding", "ConcatBitcast", "AssumeGatherIndicesInBound", "SPMDFullToShardShape", "SPMDShardToFullShape",
)  # fmt: skip
"""Custom calls that move nothing."""


class Collective(NamedTuple):
    """One collective operation."""

    kind: str
    group: int
    """Devices in each group that communicates."""
    spans_slices: bool
    """Whether a group has devices in several slices."""
    bytes: float
    """Size of the whole array: after a gather, before a reduction."""
    times: int

    @property
    def sent(self) -> float:
        """The fewest bytes that a device can send for it, over all its runs."""
        part = (self.group - 1) / self.group
        of_whole = {"all-reduce": 2 * part, "collective-permute": 1.0}.get(self.kind, part)
        return self.times * self.bytes * of_whole


def collectives(partitioned: Program, devices_per_slice: int, compiled: Program | None = None) -> Iterator[Collective]:
    """The collectives of a partitioned program whose groups have more than one device.

    An all-reduce of which each device then uses only a slice counts as a reduce-scatter: the TPU compiler turns nearly
    all of them into one.

    Args:
        partitioned: the program as the partitioner leaves it.
        devices_per_slice: devices are numbered slice by slice.
        compiled: the compiled program; an array that it gathers in a narrower type counts in that type.
    """
    compiled_types = {} if compiled is None else _types_by_channel(compiled)
    for computation, times in partitioned.executions():
        users: dict[str, set[str]] = {}
        for instruction in computation.values():
            for operand in instruction.operands:
                users.setdefault(operand, set()).add(instruction.opcode)
        for name, instruction in computation.items():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            group = _a_group(instruction, devices_per_slice)
            if len(group) == 1:
                continue
            sizes = [shape.bytes for shape in instruction.shapes]
            # The result of a start operation includes the operand.
            whole = max(sizes) if instruction.opcode.endswith("-start") else math.fsum(sizes)
            narrower = compiled_types.get(instruction.attribute(r"channel_id=(\d+)") or "")
            if kind == "all-gather" and narrower is not None and len(instruction.shapes) == 1:
                whole = min(whole, instruction.shapes[0]._replace(dtype=narrower).bytes)
            if kind == "reduce-scatter":
                whole *= len(group)
            if kind == "all-reduce" and users.get(name) == {"dynamic-slice"}:
                kind = "reduce-scatter"
            spans_slices = len({device // devices_per_slice for device in group}) > 1
            yield Collective(kind, len(group), spans_slices, whole, times)


def _types_by_channel(compiled: Program) -> dict[str, str]:
    """The type of each collective's array by channel, a number that stays the same in all stages of compilation."""
    return {
        channel: instruction.shapes[0].dtype
        for computation in compiled.computations.values()
        for instruction in computation.values()
        if instruction.opcode.removesuffix("-start") in COLLECTIVES
        and (channel := instruction.attribute(r"channel_id=(\d+)")) is not None
    }


def _a_group(instruction: Instruction, devices_per_slice: int) -> list[int]:
    """The devices of one group; of pairs of source and target, one between slices if there is any."""
    attributes = instruction.attributes
    if (pairs := re.search(r"source_target_pairs=\{([^=]*?)\}\}", attributes)) is not None:
        moves = [[int(a), int(b)] for a, b in re.findall(r"(\d+),(\d+)", pairs[1]) if a != b]
        crossing = [move for move in moves if move[0] // devices_per_slice != move[1] // devices_per_slice]
        return (crossing or moves or [[0]])[0]
    if (listed := instruction.attribute(r"replica_groups=\{\{([\d,]+)\}")) is not None:
        return _numbers(listed)
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota is not None:
        return _transposed_iota(iota[2], iota[3])[: int(iota[1])].tolist()
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", attributes
    )
    if mesh is None:
        raise ValueError(f"the groups of devices of {instruction.name} cannot be parsed: {attributes[:200]}")
    axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
    devices = _transposed_iota(mesh[2] or str(math.prod(axes.values())), mesh[3]).reshape(*axes.values())
    group_axes = re.findall(r"\w+", mesh[4])
    return devices[tuple(slice(None) if name in group_axes else 0 for name in axes)].ravel().tolist()


def _transposed_iota(sizes: str, order: str | None) -> np.ndarray:
    """0, 1, .. in an array of these sizes, transposed, flattened."""
    devices = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return (devices if order is None else devices.transpose(_numbers(order))).ravel()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def matmul_flops(partitioned: Program) -> float:
    """Flops of all matmuls, Splash attention's included; a multiplication and an addition are two."""
    total = 0.0
    for computation, times in partitioned.executions():
        for instruction in computation.values():
            if instruction.opcode == "dot":
                total += times * _dot_flops(instruction, computation)
            elif instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes:
                total += times * _kernel_flops(instruction, computation)
    return total


def _dot_flops(dot: Instruction, computation: dict[str, Instruction]) -> float:
    left = computation[dot.operands[0]].shapes[0].sizes
    contracting = _numbers(dot.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or "")
    return 2.0 * math.prod(dot.shapes[0].sizes) * math.prod(left[axis] for axis in contracting)


def _kernel_flops(kernel: Instruction, computation: dict[str, Instruction]) -> float:
    """Of Splash attention: two matmuls forward, five backward, of which the causal mask leaves half. Of others: 0."""
    if "splash_mha" not in kernel.attributes:
        return 0.0
    shapes = [computation[operand].shapes[0].sizes for operand in kernel.operands]
    query, key = [sizes for sizes in shapes if len(sizes) == 4][:2]
    matmuls = 2 if "splash_mha_fwd" in kernel.attributes else 5
    return matmuls * 2.0 * math.prod(query) * key[2] / 2


def hbm_bytes(compiled: Program) -> float:
    """Bytes that a compiled program reads from and writes to HBM.

    Operands and results of every instruction that are not in on-chip memory. If a fusion only slices an operand, or
    only updates a slice of it, the slice counts.
    """
    return math.fsum(
        times * _instruction_bytes(instruction, computation, compiled)
        for computation, times in compiled.executions()
        for instruction in computation.values()
    )


def _instruction_bytes(instruction: Instruction, computation: dict[str, Instruction], program: Program) -> float:
    opcode = instruction.opcode
    if opcode in _MOVE_NOTHING or opcode.endswith("-done"):
        return 0.0
    if opcode == "custom-call" and any(
        f'custom_call_target="{name}"' in instruction.attributes for name in _ANNOTATIONS
    ):
        return 0.0
    results = math.fsum(shape.bytes for shape in instruction.shapes if shape.in_hbm)
    if opcode == "copy-start":  # between HBM and on-chip memory; the result holds target and source
        return math.fsum(shape.bytes for shape in instruction.shapes[:2] if shape.in_hbm)
    if opcode.removesuffix("-start") in COLLECTIVES and opcode.endswith("-start"):  # the result includes the operand
        return results
    if opcode.endswith("-start"):  # of slicing: the result includes the operand and the smaller slice
        return min((shape.bytes for shape in instruction.shapes if len(shape.sizes) > 0), default=0.0)
    operands = [computation[name] for name in instruction.operands if name in computation]
    if opcode in ("dynamic-slice", "slice", "gather"):
        read = math.fsum(shape.bytes for shape in instruction.shapes) if operands[0].shapes[0].in_hbm else 0.0
        return results + read
    if opcode == "dynamic-update-slice":
        return 2 * math.fsum(shape.bytes for shape in operands[1].shapes)
    if opcode == "fusion":
        return _fusion_bytes(instruction, operands, program)
    return results + math.fsum(shape.bytes for operand in operands for shape in operand.shapes if shape.in_hbm)


def _fusion_bytes(fusion: Instruction, operands: list[Instruction], program: Program) -> float:
    inside = program.computations[fusion.called("calls")]
    users: dict[str, list[Instruction]] = {}
    for instruction in inside.values():
        for operand in instruction.operands:
            users.setdefault(operand, []).append(instruction)
    parameters = {
        int(number): name
        for name, instruction in inside.items()
        if instruction.opcode == "parameter" and (number := instruction.attribute(r"^(\d+)$")) is not None
    }
    aliased = re.findall(r"\{(\d*)\}: \((\d+)", fusion.attribute(r"output_to_operand_aliasing=\{(.*?\))\}") or "")
    aliased_operands = {int(operand) for _, operand in aliased}
    aliased_results = {int(result or 0) for result, _ in aliased}
    collective = any(instruction.opcode.startswith(COLLECTIVES) for instruction in inside.values())
    total = 0.0
    for place, operand in enumerate(operands):
        whole = math.fsum(shape.bytes for shape in operand.shapes if shape.in_hbm)
        uses = users.get(parameters.get(place, ""), [])
        if uses and all(use.opcode in ("dynamic-slice", "slice") for use in uses):
            whole = min(whole, math.fsum(shape.bytes for use in uses for shape in use.shapes))
        elif uses and all(use.opcode == "dynamic-update-slice" and use.operands[0] != use.operands[1] for use in uses):
            whole = 0.0 if all(use.operands[0] == parameters[place] for use in uses) else whole
        if place in aliased_operands and collective:
            whole = 0.0  # passed between the parts of one collective
        total += whole
    updates = [instruction for instruction in inside.values() if instruction.opcode == "dynamic-update-slice"]
    for place, shape in enumerate(fusion.shapes):
        if not shape.in_hbm or (place in aliased_results and collective):
            continue
        slices = [
            math.fsum(each.bytes for each in inside[update.operands[1]].shapes)
            for update in updates
            if update.shapes[0].sizes == shape.sizes and update.shapes[0].dtype == shape.dtype
        ]
        total += min([shape.bytes, *slices])
    return total
