"""The memory needs no communication: no collective of a compiled program moves a part of it."""

import json

import pytest

from eight_devices import on_eight_devices


def collectives(of):
    return json.loads(on_eight_devices("memory_collectives.py", of).splitlines()[-1])


def test_read_write_and_undo_have_no_collectives():
    # Forward, and backward with respect to the state, the observation and the query.
    found = collectives("memory")
    assert found.pop("wrong") > 0  # a collective that must be there is found
    assert len(found) >= 5
    assert set(found.values()) == {0}


@pytest.mark.slow
def test_no_collective_of_a_training_step_moves_the_memory():
    found = collectives("steps")
    assert len(found) == 3
    for name, step in found.items():
        assert step["all"] > 0, name
        assert step["memory"] == 0, name
        # Every device holds an eighth of 8 rows, 16 tokens, 8 groups and 7 x 26 numbers.
        assert step["largest"] == (0 if "dual" in name else 8 * 16 * 8 * 7 * 26 // 8), name
