"""What one device does in a run of a program: flops of products, traffic with the main memory, bytes over the network.

Unlike the compiler's own count, the body of a loop counts as often as the loop turns.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from ldm_jax.roofline.hlo import Instruction, Program

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_IN_PLACE = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional", "call", "after-all",
    "partition-id", "opt-barrier",
}  # fmt: skip
_MARKS = ("Sharding", "ConcatBitcast", "AssumeGatherIndicesInBound", "SPMDFullToShardShape", "SPMDShardToFullShape")


class Collective(NamedTuple):
    """One operation among devices."""

    kind: str
    group: int
    """Devices that take part together."""
    spans_slices: bool
    """Some of a group are in another slice of the pod than others."""
    bytes: float
    """Of the whole array: the gathered one, the one to reduce."""
    times: int
    where: str
    """The operation of the model that it is a part of."""

    @property
    def sent(self) -> float:
        """Bytes that a device has to send, at least, in all its runs."""
        part = (self.group - 1) / self.group
        of_whole = {"all-reduce": 2 * part, "collective-permute": 1.0}.get(self.kind, part)
        return self.times * self.bytes * of_whole


def collectives(partitioned: Program, devices_of_slice: int, compiled: Program | None = None) -> Iterator[Collective]:
    """Those of a program as the partitioner leaves it; groups of one device are left out.

    An all-reduce of which every device then keeps its part alone counts as a reduce-scatter: the TPU's compiler makes
    nearly all of them one.

    Args:
        partitioned: the program.
        devices_of_slice: the devices of a program are numbered slice by slice.
        compiled: the same, compiled: arrays that it sends in a narrower type than they had count in that.
    """
    sent_as = {} if compiled is None else _types_by_channel(compiled)
    for computation, times in partitioned.executions():
        users: dict[str, set[str]] = {}
        for instruction in computation.values():
            for operand in instruction.operands:
                users.setdefault(operand, set()).add(instruction.opcode)
        for name, instruction in computation.items():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            first, size = _group(instruction, devices_of_slice)
            if size == 1:
                continue
            # What starts an operation returns the operand, too.
            in_bytes = [shape.bytes for shape in instruction.shapes]
            whole = max(in_bytes) if instruction.opcode.endswith("-start") else math.fsum(in_bytes)
            narrower = sent_as.get(instruction.attribute(r"channel_id=(\d+)") or "")
            if kind == "all-gather" and narrower is not None and len(instruction.shapes) == 1:
                whole = min(whole, instruction.shapes[0]._replace(dtype=narrower).bytes)
            if kind == "reduce-scatter":
                whole *= size
            if kind == "all-reduce" and users.get(name) == {"dynamic-slice"}:
                kind = "reduce-scatter"
            spans = len({device // devices_of_slice for device in first}) > 1
            where = instruction.attribute(r'op_name="([^"]*)"') or ""
            yield Collective(kind, size, spans, whole, times, where)


def _types_by_channel(compiled: Program) -> dict[str, str]:
    """The type of what is sent, by the number that an operation has in every stage of the compilation."""
    return {
        channel: instruction.shapes[0].dtype
        for computation in compiled.computations.values()
        for instruction in computation.values()
        if instruction.opcode.removesuffix("-start") in COLLECTIVES
        and (channel := instruction.attribute(r"channel_id=(\d+)")) is not None
    }


def _group(instruction: Instruction, devices_of_slice: int) -> tuple[tuple[int, ...], int]:
    """The first group that takes part (of pairs one between slices, if there is any), and how many are in a group."""
    pairs = re.search(r"source_target_pairs=\{([^=]*?)\}\}", instruction.attributes)
    if pairs is not None:
        moved = [(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs[1]) if a != b]
        crossing = (pair for pair in moved if pair[0] // devices_of_slice != pair[1] // devices_of_slice)
        return next(crossing, (0, 0)), 2 if moved else 1
    listed = instruction.attribute(r"replica_groups=\{\{([\d,]+)\}")
    if listed is not None:
        group = tuple(int(device) for device in listed.split(","))
        return group, len(group)
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", instruction.attributes)
    if iota is not None:
        devices = _arranged(iota[3], iota[4])
        return tuple(devices[: int(iota[2])]), int(iota[2])
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}",
        instruction.attributes,
    )
    if mesh is None:
        raise ValueError(f"the devices of {instruction.name} are not understood: {instruction.attributes[:200]}")
    axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
    devices = _arranged(mesh[2], mesh[3]) if mesh[2] else list(range(math.prod(axes.values())))
    strides, stride = {}, 1
    for name in reversed(axes):
        strides[name] = stride
        stride *= axes[name]
    group = [0]
    for name in re.findall(r"\w+", mesh[4]):
        group = [place + step * strides[name] for place in group for step in range(axes[name])]
    return tuple(devices[place] for place in group), len(group)


def _arranged(sizes: str, order: str | None) -> list[int]:
    """The devices 0, 1, .. in an array of these sizes, transposed and flattened."""
    shape = [int(size) for size in sizes.split(",")]
    axes = list(range(len(shape))) if order is None else [int(axis) for axis in order.split(",")]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    devices = [0]
    for axis in axes:
        devices = [device + step * strides[axis] for device in devices for step in range(shape[axis])]
    return devices


def product_flops(partitioned: Program) -> float:
    """Flops of all matrix products, those of attention's kernels included; two for a multiplication and an addition."""
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
    summed = dot.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    contracted = math.prod(left[int(axis)] for axis in summed.split(",") if axis)
    return 2.0 * math.prod(dot.shapes[0].sizes) * contracted


def _kernel_flops(kernel: Instruction, computation: dict[str, Instruction]) -> float:
    """Of Splash attention: two products forward, five backward, half of each behind the causal mask."""
    if "splash_mha" not in kernel.attributes:
        return 0.0
    shapes = [computation[operand].shapes[0].sizes for operand in kernel.operands]
    query, key = [sizes for sizes in shapes if len(sizes) == 4][:2]
    products = 2 if "splash_mha_fwd" in kernel.attributes else 5
    return products * 2.0 * math.prod(query) * key[2] / 2


def hbm_bytes(compiled: Program) -> float:
    """Bytes that a compiled program moves from and to the main memory (HBM).

    Operands and results of every instruction, as far as they are not in memory on the chip; of an array that a fusion
    only takes slices from, or puts a slice into, the slices.
    """
    return math.fsum(
        times * _moved(instruction, computation, compiled)
        for computation, times in compiled.executions()
        for instruction in computation.values()
    )


def _moved(instruction: Instruction, computation: dict[str, Instruction], program: Program) -> float:
    opcode = instruction.opcode
    if opcode in _IN_PLACE or opcode.endswith("-done"):
        return 0.0
    if opcode == "custom-call" and any(f'custom_call_target="{mark}"' in instruction.attributes for mark in _MARKS):
        return 0.0
    results = math.fsum(shape.bytes for shape in instruction.shapes if shape.in_hbm)
    if opcode == "copy-start":  # from one memory to the other: the result names both
        return math.fsum(shape.bytes for shape in instruction.shapes[:2] if shape.in_hbm)
    if opcode.removesuffix("-start") in COLLECTIVES and opcode.endswith("-start"):  # the result names the operand, too
        return math.fsum(shape.bytes for shape in instruction.shapes if shape.in_hbm)
    if opcode.endswith("-start"):  # of a slice: the result names the operand, and the slice last
        return min((shape.bytes for shape in instruction.shapes if len(shape.sizes) > 0), default=0.0)
    operands = [computation[name] for name in instruction.operands if name in computation]
    if opcode in ("dynamic-slice", "slice", "gather"):
        read = math.fsum(shape.bytes for shape in instruction.shapes) if operands[0].shapes[0].in_hbm else 0.0
        return results + read
    if opcode == "dynamic-update-slice":
        return 2 * math.fsum(shape.bytes for shape in operands[1].shapes)
    if opcode == "fusion":
        return _fusion_moved(instruction, operands, program)
    return results + math.fsum(shape.bytes for operand in operands for shape in operand.shapes if shape.in_hbm)


def _fusion_moved(fusion: Instruction, operands: list[Instruction], program: Program) -> float:
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
            whole = 0.0  # handed on from one part of an operation among devices to the next
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
