"""Parse the HLO text of a program: its computations, their instructions, and how often each runs."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_BITS = {"pred": 8, "token": 0, "opaque": 0}  # of types without a width in their name
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_NAMED = re.compile(r"%([\w.$-]+)")


class ArrayShape(NamedTuple):
    """Type, sizes and memory of an array."""

    dtype: str
    sizes: tuple[int, ...]
    in_hbm: bool
    """Whether it is in HBM and not in on-chip memory."""

    @property
    def bytes(self) -> float:
        """Without padding. Raises ValueError for an unknown type."""
        named = re.match(r"(?:bf|f|s|u|c)(\d+)", self.dtype)
        if self.dtype not in _BITS and named is None:
            raise ValueError(f"the type {self.dtype} is unknown.")
        return math.prod(self.sizes) * (_BITS[self.dtype] if named is None else int(named[1])) / 8


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shapes: tuple[ArrayShape, ...]
    """Of the result; all arrays of a tuple."""
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes."""
        found = re.search(pattern, self.attributes)
        return None if found is None else found[1]

    def called(self, role: str) -> str:
        """The name of the computation in an attribute such as `body`."""
        name = self.attribute(rf"\b{role}=%([\w.$-]+)")
        if name is None:
            raise ValueError(f"{self.opcode} {self.name} has no {role}: {self.attributes[:200]}")
        return name


class Program(NamedTuple):
    """Computations by name; a computation holds its instructions by name, in order."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def executions(self) -> Iterator[tuple[dict[str, Instruction], int]]:
        """Every computation that control flow runs, and how many times: the body of a `scan` once per iteration.

        Every branch of a conditional counts.
        """
        yield from self._inside(self.entry, 1)

    def _inside(self, name: str, times: int) -> Iterator[tuple[dict[str, Instruction], int]]:
        computation = self.computations[name]
        yield computation, times
        for instruction in computation.values():
            match instruction.opcode:
                case "while":
                    iterations = self._iterations(instruction.called("condition"))
                    yield from self._inside(instruction.called("body"), times * iterations)
                case "call":
                    yield from self._inside(instruction.called("to_apply"), times)
                case "conditional":
                    branches = instruction.attribute(r"branch_computations=\{([^}]*)\}") or " ".join(
                        instruction.attribute(rf"{part}_computation=(%[\w.$-]+)") or "" for part in ("true", "false")
                    )
                    for branch in _NAMED.findall(branches):
                        yield from self._inside(branch, times)

    def _iterations(self, condition: str) -> int:
        """Of a loop from 0 whose condition is `counter < constant`, as of `jax.lax.scan`; 1 without a constant."""
        constants = [
            int(found)
            for instruction in self.computations[condition].values()
            if instruction.opcode == "constant" and (found := instruction.attribute(r"^(\d+)$")) is not None
        ]
        return max(constants, default=1)


def parse_program(text: str) -> Program:
    """Parses HLO text in the long form, whose names start with %."""
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
    """The lines; an instruction whose attributes span several lines becomes one."""
    pending = ""
    for line in text.splitlines():
        if line == "}" or line.startswith(("  %", "  ROOT", "%", "ENTRY")):
            yield pending
            pending = line
        else:
            pending += line
    yield pending


def _instruction(line: str) -> Instruction | None:
    name, equals, rest = line.partition(" = ")
    if not equals or not name.startswith("%"):
        return None
    shape, rest = _split_parenthesis(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, _, rest = rest.strip().partition("(")
    inside, attributes = _split_parenthesis("(" + rest)
    operands = tuple(_NAMED.findall(inside))
    if opcode in ("constant", "parameter"):  # a number in parentheses, which is kept
        attributes = inside[1:-1]
    return Instruction(name[1:], _shapes(shape), opcode, operands, attributes.lstrip(", "))


def _split_parenthesis(text: str) -> tuple[str, str]:
    """Splits a text that starts with a parenthesis after the matching one."""
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
