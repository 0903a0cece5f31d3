"""Kernels that the compiler does not partition, run on a mesh by `shard_map`: same results as plain JAX."""

import json

import pytest

from cases import ALL_MESHES
from eight_devices import on_eight_devices


def check_kernels(cases):
    rows = [json.loads(line) for line in on_eight_devices("sharded_kernels.py", json.dumps(cases)).splitlines()]
    assert [row["case"] for row in rows] == [[kind, list(sizes), segmented] for kind, sizes, segmented in cases]
    for row in rows:
        assert row["difference"] < 1e-5, row  # float32, with another order of summation


def test_kernels_match_plain_jax_on_one_device():
    check_kernels([
        ("attention", (1, 2, 2, 2), True),
        ("attention", (2, 1, 2, 2), False),
        ("write", (2, 2, 1, 2), False),
        ("write", (1, 2, 2, 2), False),
    ])  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.slow
def test_kernels_on_every_mesh_that_divides_them():
    # Four rows, four query heads, two key-value heads, two groups.
    meshes = [sizes for sizes in ALL_MESHES if sizes[0] * sizes[1] <= 4 and sizes[3] <= 2]
    assert len(meshes) > 5
    check_kernels([("attention", sizes, segmented) for sizes in meshes for segmented in (False, True)])
    check_kernels([("write", sizes, False) for sizes in meshes])
