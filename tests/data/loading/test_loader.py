import itertools
import time

import numpy as np
import pytest

from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import EvalLoader, Prefetch, TrainLoader, TrainRows, next_token_targets
from bert_jax.data.loading.masking import Masking

SHAPES = {
    "input_ids": (16, 64), "token_type_ids": (16, 64), "positions": (16, 64), "sequence_ids": (16, 64),
    "masked_positions": (16, 10), "masked_ids": (16, 10), "masked_weights": (16, 10),
    "cls_positions": (16, 1), "next_sentence_labels": (16, 1), "next_sentence_weights": (16, 1),
}  # fmt: skip


class Loader(TrainLoader):
    """Loader of one dataset that also returns the instances of its rows."""

    def __init__(
        self, dataset, *, seed=0, batch=16, masking=None, left_to_right=False, static_masks=0, max_sequences=1, **where
    ):
        masking = None if left_to_right else masking or Masking(10)
        rows = TrainRows(dataset, seed=seed, masking=masking, static_masks=static_masks, max_sequences=max_sequences)
        super().__init__([rows], seed=seed, global_batch_size=batch, **where)
        self.size = rows.size

    def examples(self, step):
        instances, epochs = self.sources[0].instances(self.row_numbers(step)[1])
        return instances[:, 0], epochs


def make(dataset, seed=0, batch=16, **masking):
    return Loader(dataset, seed=seed, batch=batch, masking=Masking(10, **masking))


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert np.array_equal(one[name], other[name]), name


def unmask(batch):
    ids = batch["input_ids"].copy()
    row, slot = np.nonzero(batch["masked_weights"])
    ids[row, batch["masked_positions"][row, slot]] = batch["masked_ids"][row, slot]
    return ids


# --- Training ---------------------------------------------------------------------------------------------------


def test_layout(dataset):
    batch = make(dataset).batch(3)
    assert {name: array.shape for name, array in batch.items()} == SHAPES
    floats = {name for name, array in batch.items() if array.dtype == np.float32}
    assert floats == {"masked_weights", "next_sentence_weights"}
    assert all(array.dtype == np.int32 for name, array in batch.items() if name not in floats)
    assert (batch["next_sentence_weights"] == 1).all()
    assert (batch["cls_positions"] == 0).all()
    lengths = batch["sequence_ids"].sum(axis=1)
    expected = [min(10, max(1, round(0.15 * length))) for length in lengths.tolist()]
    assert batch["masked_weights"].sum(axis=1).tolist() == expected


def test_a_batch_is_its_instances(dataset):
    loader = make(dataset)
    batch = loader.batch(5)
    indices, _ = loader.examples(5)
    plain = dataset.instances("train", indices)
    assert np.array_equal(unmask(batch), plain["input_ids"])
    assert np.array_equal(batch["next_sentence_labels"][:, 0], plain["is_random_next"])
    for name in ("token_type_ids", "positions", "sequence_ids"):
        assert np.array_equal(batch[name], plain[name])


@pytest.mark.parametrize("most", [1, 6])
def test_batches_are_pure(most, dataset_dir, dataset):
    steps = [0, 1, 2, 44, 45, 46, 1000, 10**9]
    first = {step: Loader(dataset, max_sequences=most).batch(step) for step in steps}
    loader = Loader(PreparedDataset(str(dataset_dir)), max_sequences=most)
    for step in [*reversed(steps), 44, 44]:
        assert_same(loader.batch(step), first[step])
        assert_same(loader.batch(step, slice(8, None)), {name: rows[8:] for name, rows in first[step].items()})


@pytest.mark.parametrize("batch", [1, 15, 16, 97])
def test_an_epoch_sees_everything_once(dataset, batch):
    loader = make(dataset, batch=batch)
    size = loader.size
    steps = -(-3 * size // batch)
    pairs = [loader.examples(step) for step in range(steps)]
    indices = np.concatenate([found for found, _ in pairs])
    epochs = np.concatenate([epoch for _, epoch in pairs])
    assert np.array_equal(epochs, np.arange(len(epochs)) // size)
    orders = [indices[epoch * size : (epoch + 1) * size] for epoch in range(3)]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(size))
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).mean() < 0.05


@pytest.mark.parametrize("rounds", [1, 3])
def test_static_masks_come_round_again(dataset, rounds):
    loader = Loader(dataset, batch=dataset.size("train"),
                         static_masks=rounds)  # fmt: skip

    def by_instance(epoch):
        batch, (indices, _) = loader.batch(epoch), loader.examples(epoch)
        return batch["input_ids"][np.argsort(indices)]

    epochs = [by_instance(epoch) for epoch in range(2 * rounds)]
    for epoch in range(rounds):
        assert np.array_equal(epochs[epoch], epochs[epoch + rounds])
        for other in range(epoch):
            assert (epochs[epoch] != epochs[other]).any(axis=1).mean() > 0.9
    assert np.array_equal(epochs[0], by_instance(0))


def test_left_to_right_batches_predict_every_next_token(dataset, dataset_dir):
    loader = Loader(dataset, left_to_right=True)
    batch, (indices, _) = loader.batch(2), loader.examples(2)
    plain = dataset.instances("train", indices)
    assert np.array_equal(batch["input_ids"], plain["input_ids"])
    for row in range(16):
        length = int(plain["sequence_ids"][row].sum())
        assert batch["masked_positions"][row].tolist() == list(range(64))
        assert batch["masked_weights"][row].tolist() == [1.0] * (length - 1) + [0.0] * (64 - length + 1)
        assert batch["masked_ids"][row, : length - 1].tolist() == plain["input_ids"][row, 1:length].tolist()
    evaluation = EvalLoader([PreparedDataset(str(dataset_dir))], batch_size=16, left_to_right=True).batch(0)
    assert {name: entry.shape for name, entry in evaluation.items()} == {n: e.shape for n, e in batch.items()}
    assert evaluation["masked_weights"].sum() > 16


def test_a_next_token_is_never_that_of_another_sequence():
    ids = np.array([[2, 7, 8, 2, 9, 0]], np.int32)
    targets = next_token_targets(ids, np.array([[1, 1, 1, 2, 2, 0]]))
    assert targets["masked_weights"].tolist() == [[1, 1, 0, 1, 0, 0]]
    assert targets["masked_ids"].tolist() == [[7, 8, 0, 9, 0, 0]]


def test_order_follows_the_dataset(dataset):
    other = PreparedDataset(str(dataset.folder))
    other.info = type(dataset.info)(**{**dataset.info.__dict__, "hash": "0"})
    assert (make(dataset).examples(0)[0] != make(other).examples(0)[0]).any()


# --- Evaluation -------------------------------------------------------------------------------------------------


def test_eval_masks_never_change(dataset, dataset_dir):
    one = list(EvalLoader([dataset], batch_size=16))
    make(dataset, seed=7, mask_token=0, keep_token=0, random_token=1).batch(0)
    two = list(EvalLoader([PreparedDataset(str(dataset_dir))], batch_size=16))
    assert len(one) == len(two) > 1
    for first, second in zip(one, two, strict=True):
        assert_same(first, second)
    small = list(EvalLoader([dataset], batch_size=7))
    for name in ("input_ids", "masked_positions", "masked_ids", "masked_weights"):
        size = dataset.size("eval")
        assert np.array_equal(
            np.concatenate([batch[name] for batch in one])[:size],
            np.concatenate([batch[name] for batch in small])[:size],
        )


@pytest.mark.parametrize("batch_size", [1, 7, 16, 1000])
def test_eval_padding_weighs_nothing(dataset, batch_size):
    size = dataset.size("eval")
    loader = EvalLoader([dataset], batch_size=batch_size)
    batches = list(loader)
    assert len(batches) == loader.batches == -(-size // batch_size)
    assert all(len(batch["input_ids"]) == batch_size for batch in batches)
    assert sum(batch["next_sentence_weights"].sum() for batch in batches) == size
    lengths = dataset.instances("eval", np.arange(size))["sequence_ids"].sum(axis=1)
    expected = sum(min(10, max(1, round(0.15 * length))) for length in lengths.tolist())
    assert sum(batch["masked_weights"].sum() for batch in batches) == expected
    last = batches[-1]
    filled = len(batches) * batch_size - size
    if filled:
        assert (last["masked_weights"][-filled:] == 0).all()
        assert (last["next_sentence_weights"][-filled:] == 0).all()
        assert (last["sequence_ids"][-filled:].sum(axis=1) > 0).all()  # no row is empty: no division by zero


# --- Prefetch ---------------------------------------------------------------------------------------------------


def test_prefetch_keeps_order():
    assert list(Prefetch(lambda step: step * step, 3, 40)) == [step * step for step in range(3, 40)]
    assert list(Prefetch(lambda step: step, 5, 5)) == []
    assert list(Prefetch(lambda step: step, 5, 2)) == []


def test_prefetch_runs_ahead_but_not_far():
    made = []
    items = Prefetch(lambda step: made.append(step) or step, 0, 100)
    assert next(items) == 0
    deadline = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert 5 <= len(made) <= 9
    items.close()


@pytest.mark.timeout(30)
def test_prefetch_raises_where_the_item_would_have_come():
    def make_item(step):
        if step == 4:
            raise ValueError("step 4")
        return step

    items = Prefetch(make_item, 0, 10)
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="step 4"):
        next(items)
    items.close()
