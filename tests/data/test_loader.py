"""Batches: one sequence of windows for any batch size and number of hosts, mixtures, segments, errors."""

from itertools import islice

import numpy as np
import pytest

from corpora import prepared, words, write_lines
from ldm_jax.config import DataConfig
from ldm_jax.data import load_data, load_validation_text
from ldm_jax.data.loader import random_windows, shuffled_windows, spread_windows
from ldm_jax.errors import UserError

CONTEXT = 16


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two corpora with the same tokenizer, the second about a third of the size of the first, and one of bytes."""
    home, rng = tmp_path_factory.mktemp("corpora"), np.random.default_rng(0)
    prepared(home / "large", write_lines(home / "a.jsonl", words(rng, 90)), tokenizer="bpe", vocabulary=300)
    options = {"tokenizer": str(home / "large" / "tokenizer.json")}
    prepared(home / "small", write_lines(home / "b.jsonl", words(rng, 30)), **options)
    prepared(home / "bytes", write_lines(home / "c.jsonl", words(rng, 30)))
    return home


def load(corpora, *names, vocabulary=300, **options):
    directories = tuple(str(corpora / name) for name in names)
    return load_data(DataConfig(**{"corpora": directories, "context": CONTEXT} | options), vocabulary)


def windows(data, count, start=0, seed=0):
    """Windows one at a time."""
    return np.concatenate([batch.tokens for batch in islice(data.batches(start, 1, seed), count)])


def test_an_epoch_has_every_window_once_and_the_next_has_another_order(corpora):
    data = load(corpora, "large")
    stream = data.training[0].tokens
    count = (len(stream) - 1) // CONTEXT
    expected = [stream[n * CONTEXT : (n + 1) * CONTEXT + 1].tolist() for n in range(count)]
    epochs = windows(data, 3 * count).reshape(3, count, CONTEXT + 1)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == sorted(expected)
        assert epoch.tolist() != expected
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])
    assert epochs.dtype == np.int32


def test_nearby_seeds_do_not_repeat_each_others_epochs(corpora):
    data = load(corpora, "large")
    count = (len(data.training[0].tokens) - 1) // CONTEXT
    second_of_0 = windows(data, count, start=count, seed=0)
    assert not np.array_equal(second_of_0, windows(data, count, seed=1))


def gathered(data, start, batch_size, hosts, count):
    """The windows of `count` batches, each host having read its rows."""
    share = batch_size // hosts
    parts = [data.batches(start, batch_size, 5, range(host * share, (host + 1) * share)) for host in range(hosts)]
    return np.concatenate([np.concatenate([next(part).tokens for part in parts]) for _ in range(count)])


@pytest.mark.parametrize("names", [("large",), ("large", "small")])
def test_all_hosts_and_batch_sizes_read_one_sequence(corpora, names):
    data = load(corpora, *names, weights=(2.0, 1.0)[: len(names)])
    epoch = max((len(part.tokens) - 1) // CONTEXT for part in data.training)
    one_by_one = windows(data, 2 * epoch + 80, seed=5)
    for hosts in (1, 2, 4):
        # From the middle of an epoch, across its end, in batches of 8, then 4, then 8.
        position, seen = epoch - 21, []
        for batch_size, count in ((8, 4), (4, 5), (8, 3)):
            seen.append(gathered(data, position, batch_size, hosts, count))
            position += batch_size * count
        seen = np.concatenate(seen)
        np.testing.assert_array_equal(seen, one_by_one[epoch - 21 : position])
        assert epoch - 21 < epoch < position


def test_byte_corpora_are_read_as_one_sequence(tmp_path, rng):
    for index, text in enumerate(words(rng, 60)):
        (tmp_path / f"{index}.txt").write_text(text)
    config = DataConfig(path=f"{tmp_path}/*.txt", context=CONTEXT, validation_fraction=0.2)
    data = load_data(config, 256)
    one_by_one = windows(data, 60, seed=5)
    np.testing.assert_array_equal(gathered(data, 7, 8, 2, 3), one_by_one[7:31])
    np.testing.assert_array_equal(gathered(data, 31, 4, 4, 3), one_by_one[31:43])
    assert one_by_one.dtype == np.int32
    assert not np.array_equal(windows(data, 60, seed=4), one_by_one)
    assert data.bytes_per_token == 1


def origin(data, window):
    """The indices of the corpora that contain the window."""
    return {
        index
        for index, part in enumerate(data.training)
        if window.tobytes() in part.tokens[0 : len(part.tokens)].astype(np.int32).tobytes()
    }


@pytest.mark.parametrize(("weights", "first"), [((3.0, 1.0), 0.75), ((0.2, 0.8), 0.2), ((), None)])
def test_a_mixture_has_its_weights_from_the_start(corpora, weights, first):
    data = load(corpora, "large", "small", weights=weights)
    if first is None:
        large, small = (len(part.tokens) for part in data.training)
        first = large / (large + small)
    origins = [origin(data, window) for window in windows(data, 200)]
    assert all(origins)
    assert sum(0 in indices for indices in origins) / 200 == pytest.approx(first, abs=0.02)
    assert [part.weight for part in data.training] == pytest.approx([first, 1 - first])


def test_one_window_repeats():
    every = shuffled_windows([np.arange(20), np.arange(30, 50)], [0.5, 0.5], 12, seed=0)
    assert {int(every[index][0]) for index in range(0, 1000, 77)} == {0, 30}


def test_segments_count_the_documents_of_a_window(corpora):
    plain = load(corpora, "large", context=200)
    data = load(corpora, "large", context=200, separate_documents=True)
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


def test_validation_windows_are_shared_by_weight(corpora):
    data = load(corpora, "large", "small", weights=(3.0, 1.0))
    tokens = data.validation_windows(20).windows.tokens
    large, small = (part.tokens[0 : len(part.tokens)].astype(np.int32) for part in data.validation)
    assert len(tokens) == 20
    assert all(window.tobytes() in large.tobytes() for window in tokens[:15])
    assert all(window.tobytes() in small.tobytes() for window in tokens[15:])
    # However few windows a corpus has, it counts by its weight.
    few = load(corpora, "large", "small", weights=(3.0, 1.0)).validation_windows(10_000)
    sizes = [len(load(corpora, name).validation_windows(10_000).weights) for name in ("large", "small")]
    assert len(few.weights) == sum(sizes)
    assert sizes[0] < 2 * sizes[1]
    assert few.weights[: sizes[0]].sum() == pytest.approx(3 * few.weights[sizes[0] :].sum())
    assert few.weights.mean() == pytest.approx(1)
    one = [load(corpora, name).bytes_per_token for name in ("large", "small")]
    assert data.bytes_per_token == pytest.approx(0.75 * one[0] + 0.25 * one[1])
    text = b"".join(
        data.tokenizer.decode(data.validation[0].tokens.document(n)) for n in range(data.validation[0].tokens.documents)
    )
    assert one[0] == len(text) / np.sum(large != data.tokenizer.end_of_document)
    assert one[0] > 1.5


def test_the_description_and_the_fingerprint(corpora):
    both = load(corpora, "large", "small", weights=(3.0, 1.0))
    sizes = [len(part.tokens) for part in both.training]
    assert both.describe().startswith(f"{sum(sizes):,} ")
    assert f"{both.bytes_per_token:.2f} bytes" in both.describe()
    assert both.describe().endswith("75% large, 25% small")
    others = [
        load(corpora, "large"),
        load(corpora, "small", "large", weights=(1.0, 3.0)),
        load(corpora, "large", "small", weights=(2.0, 1.0)),
        both,
    ]
    assert len({data.fingerprint for data in others}) == 4
    assert load(corpora, "large", "small", weights=(6.0, 2.0)).fingerprint == both.fingerprint


def test_other_text_for_validation(corpora, tmp_path):
    """Files or a prepared corpus, as data.validation_path of prepared corpora or to evaluate a model on."""
    own = load(corpora, "large")
    lines = write_lines(tmp_path / "other.jsonl", ["the cat sat on größer", "", "return 日本 " * 9])
    prepared(tmp_path / "other", lines, tokenizer=str(corpora / "large" / "tokenizer.json"), validation_fraction=1.0)
    for path in (str(lines), str(tmp_path / "other")):
        data = load(corpora, "large", validation_path=path)
        other = load_validation_text(path, DataConfig(corpora=("x",), context=CONTEXT), own.tokenizer)
        assert data.fingerprint != own.fingerprint
        for text in (data, other):
            (part,) = text.validation
            tokens = part.tokens[0 : len(part.tokens)]
            assert tokens.tolist() == [
                token
                for document in ("the cat sat on größer", "return 日本 " * 9)
                for token in (*own.tokenizer.encode(document), own.tokenizer.end_of_document)
            ]
            assert text.bytes_per_token == len(("the cat sat on größer" + "return 日本 " * 9).encode()) / (
                len(tokens) - 2
            )
    with pytest.raises(UserError, match=r"training part.*other.* 0 tokens"):
        load_data(DataConfig(corpora=(str(tmp_path / "other"),), context=CONTEXT), 300)
    with pytest.raises(UserError, match=r"bytes has another tokenizer"):
        load(corpora, "large", validation_path=str(corpora / "bytes"))


def test_a_vocabulary_of_mostly_unused_ids_is_a_warning(corpora):
    (warning,) = {*load(corpora, "large", vocabulary=5000).warnings} - {*load(corpora, "large").warnings}
    assert "model.vocabulary is 5,000" in warning


def test_data_that_cannot_be_used_for_training_is_refused(corpora, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"model\.vocabulary is 299.* 300"):
        load(corpora, "large", vocabulary=299)
    with pytest.raises(UserError, match=r"bytes.*tokenizer.*large"):
        load(corpora, "large", "bytes")
    with pytest.raises(UserError, match=r"training part.*small.*2,001.*data\.context"):
        load(corpora, "small", context=2000)
    with pytest.raises(UserError, match=r"validation part.*small.*data\.context"):
        load(corpora, "small", context=len(load(corpora, "small").validation[0].tokens))
    monkeypatch.setattr("ldm_jax.data.loader.MAX_WINDOWS", 20)
    with pytest.raises(UserError, match=r"large.* 20 .*data\.context"):
        load(corpora, "large")
    with pytest.raises(UserError, match="nothing"):
        load(corpora, "nothing")
    config = DataConfig(path=str(tmp_path / "*.txt"), context=CONTEXT)
    for index in range(5):
        (tmp_path / f"{index}.txt").write_text("text " * 20 + str(index))
    with pytest.raises(UserError, match=r"model\.vocabulary is 255.* 256"):
        load_data(config, 255)


def test_the_windows_of_a_seed_are_the_same_in_all_versions():
    # Runs that were started with an earlier version resume with the same data.
    sequence = random_windows(np.arange(200, dtype=np.uint8), 8, seed=3)
    assert [int(sequence[index][0]) for index in range(8)] == [74, 104, 119, 99, 100, 53, 43, 9]


def test_random_windows_cover_the_corpus():
    sequence = random_windows(np.arange(40, dtype=np.uint8), 8, seed=0)
    drawn = np.stack([sequence[index] for index in range(320)])
    np.testing.assert_array_equal(drawn, drawn[:, :1] + np.arange(9))
    assert set(drawn[:, 0]) == set(range(32))  # 320 draws of 32 places: each is missed with 4e-5


@pytest.mark.parametrize(("count", "expected"), [(1, [0]), (3, [0, 15, 31]), (100, [0, 10, 20, 31])])
def test_validation_windows_are_spread_and_share_no_target(count, expected):
    spread = spread_windows(np.arange(40, dtype=np.uint8), 8, count)
    assert spread[:, 0].tolist() == expected[: len(spread)]
    assert len(np.unique(spread[:, 1:])) == spread[:, 1:].size
