"""Data for training: one sequence of windows whatever the batch size and the hosts, mixtures, segments, refusals."""

from itertools import islice

import numpy as np
import pytest

from corpora import prepared, words, write_lines
from ldm_jax.config import DataConfig
from ldm_jax.data import load_data
from ldm_jax.data.windows import shuffled_windows
from ldm_jax.errors import UserError

CONTEXT = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two corpora with one tokenizer, the second about a third of the first."""
    home, rng = tmp_path_factory.mktemp("corpora"), np.random.default_rng(0)
    prepared(home / "large", write_lines(home / "a.jsonl", words(rng, 90)), tokenizer="bpe", vocabulary=300)
    options = {"tokenizer": str(home / "large" / "tokenizer.json")}
    prepared(home / "small", write_lines(home / "b.jsonl", words(rng, 30)), **options)
    prepared(home / "bytes", write_lines(home / "c.jsonl", words(rng, 30)))
    return home


def load(folders, *names, vocabulary=300, **options):
    corpora = tuple(str(folders / name) for name in names)
    return load_data(DataConfig(**{"corpora": corpora, "context": CONTEXT} | options), vocabulary)


def windows(data, count, start=0, seed=0):
    """Windows one at a time."""
    return np.concatenate([batch.tokens for batch in islice(data.batches(start, 1, seed), count)])


def test_an_epoch_has_every_window_once_and_the_next_another_order(folders):
    data = load(folders, "large")
    stream = data.corpora[0].train
    count = (len(stream) - 1) // CONTEXT
    every = [stream[n * CONTEXT : (n + 1) * CONTEXT + 1].tolist() for n in range(count)]
    epochs = windows(data, 3 * count).reshape(3, count, CONTEXT + 1)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == sorted(every)
        assert epoch.tolist() != every
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])
    assert epochs.dtype == np.int32


def test_nearby_seeds_do_not_repeat_each_others_epochs(folders):
    data = load(folders, "large")
    count = (len(data.corpora[0].train) - 1) // CONTEXT
    second_of_0 = windows(data, count, start=count, seed=0)
    assert not np.array_equal(second_of_0, windows(data, count, seed=1))


def gathered(data, start, batch_size, hosts, count):
    """The windows of `count` batches, each host having read its rows."""
    share = batch_size // hosts
    parts = [data.batches(start, batch_size, 5, range(host * share, (host + 1) * share)) for host in range(hosts)]
    return np.concatenate([np.concatenate([next(part).tokens for part in parts]) for _ in range(count)])


@pytest.mark.parametrize("names", [("large",), ("large", "small")])
def test_any_hosts_and_batch_sizes_go_through_one_sequence(folders, names):
    data = load(folders, *names, weights=(2.0, 1.0)[: len(names)])
    epoch = max((len(corpus.train) - 1) // CONTEXT for corpus in data.corpora)
    one_by_one = windows(data, 2 * epoch + 80, seed=5)
    for hosts in (1, 2, 4):
        # From the middle of an epoch in batches of 8, over its end, then on in batches of 4, then of 8 again.
        position, seen = epoch - 21, []
        for batch_size, count in ((8, 4), (4, 5), (8, 3)):
            seen.append(gathered(data, position, batch_size, hosts, count))
            position += batch_size * count
        seen = np.concatenate(seen)
        np.testing.assert_array_equal(seen, one_by_one[epoch - 21 : position])
        assert epoch - 21 < epoch < position


def test_bytes_in_memory_go_through_one_sequence_too(tmp_path, rng):
    for index, text in enumerate(words(rng, 60)):
        (tmp_path / f"{index}.txt").write_text(text)
    config = DataConfig(path=f"{tmp_path}/*.txt", context=CONTEXT, validation_fraction=0.2)
    data = load_data(config, 256)
    one_by_one = windows(data, 60, seed=5)
    np.testing.assert_array_equal(gathered(data, 7, 8, 2, 3), one_by_one[7:31])
    np.testing.assert_array_equal(gathered(data, 31, 4, 4, 3), one_by_one[31:43])
    assert data.bytes_per_token == 1


def origin(data, window):
    """Which corpora have the window."""
    return {
        index
        for index, corpus in enumerate(data.corpora)
        if window.tobytes() in corpus.train[0 : len(corpus.train)].astype(np.int32).tobytes()
    }


@pytest.mark.parametrize(("weights", "first"), [((3.0, 1.0), 0.75), ((0.2, 0.8), 0.2), ((), None)])
def test_a_mixture_has_its_weights_from_the_start(folders, weights, first):
    data = load(folders, "large", "small", weights=weights)
    if first is None:
        large, small = (len(corpus.train) for corpus in data.corpora)
        first = large / (large + small)
    origins = [origin(data, window) for window in windows(data, 200)]
    assert all(origins)
    assert sum(0 in corpora for corpora in origins) / 200 == pytest.approx(first, abs=0.02)
    assert [corpus.weight for corpus in data.corpora] == pytest.approx([first, 1 - first])


def test_one_window_comes_again_and_again():
    every = shuffled_windows([np.arange(20), np.arange(30, 50)], [0.5, 0.5], 12, seed=0)
    assert {int(every[index][0]) for index in range(0, 1000, 77)} == {0, 30}


def test_segments_count_the_documents_of_a_window(folders):
    plain = load(folders, "large", context=200)
    data = load(folders, "large", context=200, separate_documents=True)
    end = data.tokenizer.end_of_document
    for batch in [next(data.batches(0, 8, 0)), data.validation_windows(8).windows]:
        for tokens, segments in zip(batch.tokens, batch.segments, strict=True):
            expected, number = [], 1
            for token in tokens:
                expected.append(number)
                number += token == end
            assert segments.tolist() == expected
        assert batch.segments.dtype == np.int32
        assert batch.segments.max() > 2
    assert next(plain.batches(0, 8, 0)).segments is None
    np.testing.assert_array_equal(next(plain.batches(0, 8, 0)).tokens, next(data.batches(0, 8, 0)).tokens)


def test_validation_windows_are_shared_by_weight(folders):
    data = load(folders, "large", "small", weights=(3.0, 1.0))
    tokens = data.validation_windows(20).windows.tokens
    large, small = (corpus.validation[0 : len(corpus.validation)].astype(np.int32) for corpus in data.corpora)
    assert len(tokens) == 20
    assert all(window.tobytes() in large.tobytes() for window in tokens[:15])
    assert all(window.tobytes() in small.tobytes() for window in tokens[15:])
    # However few windows a corpus has, it counts by its weight.
    few = load(folders, "large", "small", weights=(3.0, 1.0)).validation_windows(10_000)
    sizes = [len(load(folders, name).validation_windows(10_000).weights) for name in ("large", "small")]
    assert len(few.weights) == sum(sizes)
    assert sizes[0] < 2 * sizes[1]
    assert few.weights[: sizes[0]].sum() == pytest.approx(3 * few.weights[sizes[0] :].sum())
    assert few.weights.mean() == pytest.approx(1)
    one = [load(folders, name).bytes_per_token for name in ("large", "small")]
    assert data.bytes_per_token == pytest.approx(0.75 * one[0] + 0.25 * one[1])
    text = b"".join(
        data.tokenizer.decode(data.corpora[0].validation.document(n))
        for n in range(data.corpora[0].validation.documents)
    )
    assert one[0] == len(text) / len(large)
    assert one[0] > 1.5


def test_what_is_trained_on_is_told_and_has_a_fingerprint(folders):
    both = load(folders, "large", "small", weights=(3.0, 1.0))
    sizes = [len(corpus.train) for corpus in both.corpora]
    assert both.describe().startswith(f"{sum(sizes):,} tokens to train on, ")
    assert both.describe().endswith(f" held out, {both.bytes_per_token:.2f} bytes a token; 75% large, 25% small")
    others = [
        load(folders, "large"),
        load(folders, "small", "large", weights=(1.0, 3.0)),
        load(folders, "large", "small", weights=(2.0, 1.0)),
        both,
    ]
    assert len({data.fingerprint for data in others}) == 4
    assert load(folders, "large", "small", weights=(6.0, 2.0)).fingerprint == both.fingerprint


def test_what_cannot_be_trained_on_is_refused(folders, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"model\.vocabulary is 299, but the tokenizer of the data has 300 tokens"):
        load(folders, "large", vocabulary=299)
    with pytest.raises(UserError, match=r"bytes has another tokenizer than .*large, so they cannot be mixed"):
        load(folders, "large", "bytes")
    with pytest.raises(UserError, match=r"the training part of the corpus .*small has \d+ tokens, but one window"):
        load(folders, "small", context=2000)
    with pytest.raises(UserError, match=r"the validation part of the corpus .*small has \d+ tokens, but one window"):
        load(folders, "small", context=len(load(folders, "small").corpora[0].validation))
    monkeypatch.setattr("ldm_jax.data.loader.MAX_WINDOWS", 20)
    with pytest.raises(UserError, match=r"large has \d+ windows, but no more than 20 can be shuffled"):
        load(folders, "large")
    with pytest.raises(UserError, match=r"nothing holds no prepared corpus"):
        load(folders, "nothing")
    config = DataConfig(path=str(tmp_path / "*.txt"), context=CONTEXT)
    for index in range(5):
        (tmp_path / f"{index}.txt").write_text("text " * 20 + str(index))
    with pytest.raises(UserError, match=r"model\.vocabulary is 255, but the tokenizer of the data has 256 tokens"):
        load_data(config, 255)
