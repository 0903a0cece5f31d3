"""One program on many devices and hosts: the mesh, and the processes of a job."""

from ldm_jax.parallel.agreement import (
    StopVote,
    code_fingerprint,
    first_failure,
    on_leader,
    require_same,
    wait_for_all,
)
from ldm_jax.parallel.hosts import Hosts, ending_together, is_leader, join
from ldm_jax.parallel.mesh import check_mesh, make_mesh, mesh_sizes, slices_of
from ldm_jax.parallel.rows import LocalRows

__all__ = [
    "Hosts",
    "LocalRows",
    "StopVote",
    "check_mesh",
    "code_fingerprint",
    "ending_together",
    "first_failure",
    "is_leader",
    "join",
    "make_mesh",
    "mesh_sizes",
    "on_leader",
    "require_same",
    "slices_of",
    "wait_for_all",
]
