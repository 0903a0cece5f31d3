"""Sampling on a mesh, with a sharded cache, equals that on one device; so does a memory in a model without sharding."""

import json

import pytest

from eight_devices import on_eight_devices


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [["ldm", "alone"], ["preln", "attnres", "attnres_block", "hc", "mhc", "denseformer"]],
    ids=["ldm", "baselines"],
)
def test_tokens_are_those_of_one_device(names):
    rows = [json.loads(line) for line in on_eight_devices("sharded_generation.py", *names).splitlines()]
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert row["difference"] < 2e-5, row  # float32, with another order of summation, of logits up to 10
        if row["name"] != "alone":
            assert row["same"], row
            data, fsdp, _, tensor = row["mesh"]
            assert row["parts"] == data * fsdp * tensor, row  # rows and key-value heads
