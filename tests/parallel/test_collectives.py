"""The memory needs no communication: no collective of a compiled program moves a part of it."""

import json

import pytest

from eight_devices import on_eight_devices


@pytest.fixture(scope="module")
def found():
    return json.loads(on_eight_devices("memory_collectives.py").splitlines()[-1])


def test_read_write_and_undo_have_no_collectives(found):
    # Forward, and backward with respect to the state, the observation and the query.
    assert len(found["memory"]) >= 5
    assert set(found["memory"].values()) == {0}
    assert found["wrong"] > 0  # a collective that must be there is found


def test_no_collective_of_a_training_step_moves_the_memory(found):
    assert len(found["steps"]) == 3
    for name, step in found["steps"].items():
        assert step["all"] > 0, name
        assert step["memory"] == 0, name
        # Every device holds an eighth of 8 rows, 16 tokens, 8 groups and 7 x 26 numbers.
        assert step["largest"] == (0 if "dual" in name else 8 * 16 * 8 * 7 * 26 // 8), name
