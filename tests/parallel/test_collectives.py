"""The memory needs no communication: what a compiled program sends from device to device is none of it."""

import json

import pytest

from eight_devices import on_eight_devices


@pytest.fixture(scope="module")
def found():
    return json.loads(on_eight_devices("memory_collectives.py").splitlines()[-1])


def test_reading_writing_and_undoing_send_nothing(found):
    # Forward, and backward with respect to the state, the observation and the query.
    assert len(found["memory"]) >= 5
    assert set(found["memory"].values()) == {0}
    assert found["wrong"] > 0  # which is seen where it is there


def test_a_training_step_sends_nothing_of_the_memory(found):
    assert len(found["steps"]) == 3
    for name, step in found["steps"].items():
        assert step["all"] > 0, name
        assert step["memory"] == 0, name
        # Every device has its eighth of it: 8 rows of 16 tokens, 8 groups, of 7 x 26 numbers each.
        assert step["largest"] == (0 if "dual" in name else 8 * 16 * 8 * 7 * 26 // 8), name
