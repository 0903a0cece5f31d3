"""One program over many devices: the mesh, and where the arrays of a training state and of a batch lie on it."""

from ldm_jax.parallel.agreement import (
    StopVote,
    code_fingerprint,
    first_failure,
    leader_does,
    require_same,
    wait_for_all,
)
from ldm_jax.parallel.hosts import Hosts, ending_together, join, leads
from ldm_jax.parallel.mesh import check_mesh, make_mesh, slices_of
from ldm_jax.parallel.rows import RowsHere

__all__ = [
    "Hosts",
    "RowsHere",
    "StopVote",
    "check_mesh",
    "code_fingerprint",
    "ending_together",
    "first_failure",
    "join",
    "leader_does",
    "leads",
    "make_mesh",
    "require_same",
    "slices_of",
    "wait_for_all",
]
