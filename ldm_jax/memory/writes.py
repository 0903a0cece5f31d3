"""The writes by name."""

import enum

from ldm_jax.memory.additive import ADDITIVE
from ldm_jax.memory.delta import DELTA
from ldm_jax.memory.rls import RLS
from ldm_jax.memory.sqrt_rls import SQRT_RLS
from ldm_jax.memory.write import WriteRule


class Write(enum.StrEnum):
    """The kinds of writes."""

    RLS = "rls"
    SQRT_RLS = "sqrt_rls"
    ADDITIVE = "additive"
    DELTA = "delta"

    @property
    def rule(self) -> WriteRule:
        """The arithmetic of the write."""
        return {Write.RLS: RLS, Write.SQRT_RLS: SQRT_RLS, Write.ADDITIVE: ADDITIVE, Write.DELTA: DELTA}[self]
