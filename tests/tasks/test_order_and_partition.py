"""Partitions and sample order: pure functions of the seed that neither lose nor repeat a sample."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.tasks.order import Order
from laconic.tasks.partition import parse_partition, shard_indices

LABELS = np.repeat(np.arange(10), 60)


@pytest.mark.parametrize("text", ["iid", "contiguous", "classes:1", "classes:2", "dirichlet:0.3", "dirichlet:0.01"])
@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_every_sample_has_exactly_one_worker_and_every_worker_has_samples(text, size):
    parts = [shard_indices(parse_partition(text), LABELS, rank, size, seed=5) for rank in range(size)]
    assert sorted(np.concatenate(parts)) == list(range(len(LABELS)))
    assert min(map(len, parts)) >= len(LABELS) // (10 * size)


@given(
    text=st.sampled_from(["iid", "contiguous", "classes:1", "dirichlet:0.001", "dirichlet:100"]),
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    size=st.integers(1, 12),
    seed=st.integers(0, 3),
)
def test_small_and_unbalanced_sets_are_divided_completely(text, labels, size, seed):
    array = np.array(labels)
    if len(labels) < size:
        with pytest.raises(ValueError, match=f"{size} workers need at least {size} samples"):
            shard_indices(parse_partition(text), array, 0, size, seed)
        return
    parts = [shard_indices(parse_partition(text), array, rank, size, seed) for rank in range(size)]
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    assert min(map(len, parts)) >= 1


def test_dirichlet_gives_every_worker_a_minimum():
    # This small concentration gives each class to one worker, so at most 2 of 8 workers would get any samples.
    parts = [
        shard_indices(parse_partition("dirichlet:0.001"), np.repeat([0, 1], 400), rank, 8, seed=0) for rank in range(8)
    ]
    assert sorted(map(len, parts))[:6] == [10] * 6


def test_partitions_are_as_non_iid_as_their_settings_say():
    def classes(text):
        return [
            np.bincount(LABELS[shard_indices(parse_partition(text), LABELS, rank, 5, seed=1)], minlength=10)
            for rank in range(5)
        ]

    assert all((counts > 0).all() for counts in classes("iid"))
    assert all((counts > 0).sum() == 2 for counts in classes("classes:2"))
    assert np.std(classes("dirichlet:0.1")) > 2 * np.std(classes("dirichlet:10"))


@pytest.mark.parametrize("text", ["iid", "classes:2", "dirichlet:0.3"])
def test_the_seed_decides_the_partition(text):
    partition = parse_partition(text)
    once, again, other = (shard_indices(partition, LABELS, 1, 4, seed) for seed in (7, 7, 8))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "partition must be iid, contiguous, classes:K"),
        ("random", "not 'random'"),
        ("iid:2", "not 'iid:2'"),
        ("classes", "not 'classes'"),
        ("classes:0", "at least 1, not 'classes:0'"),
        ("classes:1.5", "not 'classes:1.5'"),
        ("classes:-2", "not 'classes:-2'"),
        ("dirichlet:0", "above 0, not 'dirichlet:0'"),
        ("dirichlet:inf", "not 'dirichlet:inf'"),
        ("dirichlet:nan", "not 'dirichlet:nan'"),
        ("dirichlet:x", "not 'dirichlet:x'"),
    ],
)
def test_invalid_partition_texts(text, message):
    with pytest.raises(ValueError, match=message):
        parse_partition(text)


def test_impossible_partitions_are_rejected():
    with pytest.raises(ValueError, match="classes:2 over 4 workers needs 8 samples, not 5"):
        shard_indices(parse_partition("classes:2"), np.zeros(5, int), 0, 4, 0)
    with pytest.raises(ValueError, match="rank must be at least 0 and below size = 4, not 4"):
        shard_indices(parse_partition("iid"), LABELS, 4, 4, 0)


@given(samples=st.integers(1, 50), batch_size=st.integers(1, 70), seed=st.integers(0, 5))
def test_epochs_visit_each_sample_once_whatever_the_batch(samples, batch_size, seed):
    order = Order(np.arange(samples) * 3, batch_size, seed, rank=2)
    steps = 2 + 3 * samples // batch_size
    batches = [order(step) for step in range(steps)]
    assert {len(batch) for batch in batches} == {batch_size}
    stream = np.concatenate(batches)
    for start in range(0, len(stream) - samples + 1, samples):
        assert sorted(stream[start : start + samples]) == list(range(0, 3 * samples, 3))


def test_order_is_random_access_and_keyed_by_seed_rank_and_epoch():
    order = Order(np.arange(40), 8, seed=1, rank=0)
    forward = [order(step) for step in range(12)]
    fresh = Order(np.arange(40), 8, seed=1, rank=0)
    backward = [fresh(step) for step in reversed(range(12))][::-1]
    assert np.array_equal(forward, backward)
    assert not np.array_equal(forward[0], forward[5])  # the next epoch begins at step 5
    for seed, rank in ((2, 0), (1, 1)):
        assert not np.array_equal(forward[0], Order(np.arange(40), 8, seed, rank)(0))


def test_negative_steps_and_seeds_are_rejected():
    with pytest.raises(ValueError, match="step must not be negative, not -1"):
        Order(np.arange(4), 2, 0, 0)(-1)
    with pytest.raises(ValueError, match="negative"):
        Order(np.arange(4), 2, -3, 0)(0)
