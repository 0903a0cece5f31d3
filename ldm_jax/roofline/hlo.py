"""A compiled program as text (HLO), read: its computations, and how often each runs."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BITS = {"pred": 8, "token": 0, "opaque": 0}
"""Of types whose name does not say so."""
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_NAMED = re.compile(r"%([\w.$-]+)")


class ArrayShape(NamedTuple):
    """Of an array in a program."""

    dtype: str
    sizes: tuple[int, ...]
    in_hbm: bool
    """In the main memory; else in a memory on the chip."""

    @property
    def bytes(self) -> float:
        """Without padding. Raises ValueError for a type that is not known."""
        named = re.match(r"(?:bf|f|s|u|c)(\d+)", self.dtype)
        if self.dtype not in BITS and named is None:
            raise ValueError(f"the type {self.dtype} is not known.")
        return math.prod(self.sizes) * (BITS[self.dtype] if named is None else int(named[1])) / 8


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shapes: tuple[ArrayShape, ...]
    """Of the result; of a tuple all its arrays."""
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in the attributes."""
        found = re.search(pattern, self.attributes)
        return None if found is None else found[1]

    def called(self, role: str) -> str:
        """The computation that an attribute names."""
        name = self.attribute(rf"\b{role}=%([\w.$-]+)")
        if name is None:
            raise ValueError(f"{self.opcode} {self.name} has no {role}: {self.attributes[:200]}")
        return name


class Program(NamedTuple):
    """Computations by name; each is its instructions by name, in order."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def executions(self) -> Iterator[tuple[dict[str, Instruction], int]]:
        """Every computation that runs by itself, and how many times; the loops of `jax.lax.scan` as often as they turn.

        Of a conditional, every branch counts as run.
        """
        yield from self._inside(self.entry, 1)

    def _inside(self, name: str, times: int) -> Iterator[tuple[dict[str, Instruction], int]]:
        computation = self.computations[name]
        yield computation, times
        for instruction in computation.values():
            match instruction.opcode:
                case "while":
                    turns = self._turns(instruction.called("condition"))
                    yield from self._inside(instruction.called("body"), times * turns)
                case "call":
                    yield from self._inside(instruction.called("to_apply"), times)
                case "conditional":
                    branches = instruction.attribute(r"branch_computations=\{([^}]*)\}") or " ".join(
                        instruction.attribute(rf"{part}_computation=(%[\w.$-]+)") or "" for part in ("true", "false")
                    )
                    for branch in _NAMED.findall(branches):
                        yield from self._inside(branch, times)

    def _turns(self, condition: str) -> int:
        """Of a loop whose condition is `counter < constant`, from 0, as JAX makes of a scan; 1 without a constant."""
        constants = [
            int(found)
            for instruction in self.computations[condition].values()
            if instruction.opcode == "constant" and (found := instruction.attribute(r"^(\d+)$")) is not None
        ]
        return max(constants, default=1)


def parse_program(text: str) -> Program:
    """The program that a text of HLO describes."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", {}
    for line in _logical_lines(text):
        if line.startswith(("%", "ENTRY")) and line.endswith("{"):
            name = _NAMED.search(line)
            assert name is not None
            current = computations[name[1]] = {}
            if line.startswith("ENTRY"):
                entry = name[1]
        elif line.startswith("  "):
            instruction = _instruction(line.strip().removeprefix("ROOT "))
            if instruction is not None:
                current[instruction.name] = instruction
    return Program(computations, entry)


def _logical_lines(text: str) -> Iterator[str]:
    """The lines; an attribute that goes over several is joined to its instruction's."""
    held = ""
    for line in text.splitlines():
        if line == "}" or line.startswith(("  %", "  ROOT", "%", "ENTRY")):
            yield held
            held = line
        else:
            held += line
    yield held


def _instruction(line: str) -> Instruction | None:
    name, equals, rest = line.partition(" = ")
    if not equals or not name.startswith("%"):
        return None
    shape, rest = _split(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, _, rest = rest.strip().partition("(")
    inside, attributes = _split("(" + rest)
    operands = tuple(_NAMED.findall(inside))
    if opcode in ("constant", "parameter"):  # whose brackets hold a number
        attributes = inside[1:-1]
    return Instruction(name[1:], _shapes(shape), opcode, operands, attributes.lstrip(", "))


def _split(text: str) -> tuple[str, str]:
    """A text that begins with a bracket: up to the one that closes it, and what follows."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: place + 1], text[place + 1 :]
    return text, ""


def _shapes(text: str) -> tuple[ArrayShape, ...]:
    found = []
    for dtype, sizes, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        found.append(
            ArrayShape(dtype, tuple(int(size) for size in sizes.split(",") if size), space is None or space[1] == "0")
        )
    return tuple(found)
