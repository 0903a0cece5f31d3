"""A run that is killed at random moments ends with the losses and the bits of one that is never killed."""

import collections

import pytest

from kill_test import Kill, KillTest, histogram
from ldm_jax.config.toml import config_to_toml
from ldm_jax.errors import UserError
from runs import make_corpus, tiny


@pytest.mark.slow
def test_ten_kills(tmp_path, request):
    config = tmp_path / "config.toml"
    # With a checkpoint at every other step, half of the time goes to saves.
    config.write_text(config_to_toml(tiny(make_corpus(tmp_path / "corpus"), steps=60, validate_every=7)))
    test = KillTest(config, tmp_path / "runs")
    kills = test.run(10, request.config.getoption("--seed"))
    print(histogram(kills))
    assert len(kills) == 10
    assert collections.Counter(kill.phase for kill in kills)["save"] >= 2
    assert test.differences() == []


def test_a_used_directory_is_refused(tmp_path):
    (tmp_path / "killed").mkdir()
    with pytest.raises(UserError, match="--out"):
        KillTest(tmp_path / "config.toml", tmp_path)


def test_histogram():
    assert histogram([Kill("save", 3), Kill("step", 4), Kill("save", 5)]).splitlines()[2:] == [
        "step           1 #",
        "save           2 ##",
    ]
