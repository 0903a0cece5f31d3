"""Imported checkpoints on a mesh have the logits of transformers."""

import json

import pytest

from eight_devices import HERE, on_eight_devices


@pytest.mark.slow
def test_sharded_imports_have_the_recorded_logits():
    names = sorted(case.name for case in (HERE.parent / "convert" / "cases").iterdir())
    rows = [json.loads(line) for line in on_eight_devices("sharded_import.py", *names).splitlines()]
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert row["difference"] <= 2e-6, row
        assert row["shards"] == 4, row
