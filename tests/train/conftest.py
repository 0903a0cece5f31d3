"""Runs that several files of tests share, and that no test changes."""

import pytest

from runs import make_corpus, quietly, tiny, without_memory


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("text") / "corpus")


@pytest.fixture(scope="session")
def finished(corpus, tmp_path_factory):
    """Config, directory, final state and output of an uninterrupted run."""
    config, path = without_memory(tiny(corpus)), tmp_path_factory.mktemp("runs") / "finished"
    return config, path, *quietly(config, path)
