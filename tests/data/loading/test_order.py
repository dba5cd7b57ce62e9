"""Shuffling: each epoch has its own order of units and of the rows in each window."""

import numpy as np
import pytest

from bert_jax.data.loading.order import EpochOrder

WINDOW = 16


def make_order(sizes: np.ndarray, *, is_stratified: bool) -> EpochOrder:
    return EpochOrder(sizes, 3, window=WINDOW, is_stratified=is_stratified)


@pytest.mark.parametrize("is_stratified", [False, True])
@pytest.mark.parametrize("units", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 5, 8 * WINDOW])
def test_windows_hold_every_unit_once_in_a_new_order(units, is_stratified):
    sizes = np.random.default_rng(units).integers(1, 9, units)
    order = make_order(sizes, is_stratified=is_stratified)
    windows = -(-units // WINDOW)
    assert order.window_rows == sizes.sum() / windows
    orders, shuffles = [], []
    for epoch in range(3):
        held = [order.window_units(epoch, window) for window in range(windows)]
        assert all(len(its_units) == WINDOW for its_units in held[:-1])
        orders.append(np.concatenate(held))
        assert sorted(orders[-1].tolist()) == list(range(units))
        rows = epoch * order.size + np.arange(order.size)
        epochs, window_of, places = order.locate(rows)
        assert (epochs == epoch).all()
        assert (np.diff(window_of) >= 0).all()
        shuffles.append(places)
        for window, its_units in enumerate(held):
            its_places = places[window_of == window]
            assert sorted(its_places.tolist()) == list(range(int(sizes[its_units].sum())))
    if units > 10:
        assert (shuffles[0] != shuffles[1]).mean() > 0.8
    if units > (2 * WINDOW if is_stratified else 10):
        assert (orders[0] != orders[1]).mean() > 0.5
        assert (orders[0] != np.arange(units)).mean() > 0.8


def test_windows_of_an_epoch_are_shuffled_each_in_its_own_way():
    order = make_order(np.full(2 * WINDOW, 4), is_stratified=False)
    _, windows, places = order.locate(np.arange(order.size))
    assert (places[windows == 0] != places[windows == 1]).mean() > 0.9


@pytest.mark.parametrize("units", [8 * WINDOW, 8 * WINDOW + 5])
def test_stratified_window_has_a_unit_of_each_part_of_the_dataset(units):
    order = make_order(np.full(units, 3), is_stratified=True)
    parts = np.array_split(np.arange(units), WINDOW)
    for window in range(8):
        held = order.window_units(1, window)
        assert all(unit in part for unit, part in zip(held.tolist(), parts, strict=True))


def test_batch_is_sorted_by_unit():
    sizes = np.random.default_rng(0).integers(1, 9, 5 * WINDOW)
    order = make_order(sizes, is_stratified=True)
    rows = order.size - 100 + np.arange(200)  # in two epochs and several windows
    found = order.sort_by_unit(rows)
    assert sorted(found.tolist()) == rows.tolist()
    epochs, windows, places = order.locate(found)
    assert epochs.tolist() == [0] * 100 + [1] * 100
    units = []
    for epoch, window, place in zip(epochs.tolist(), windows.tolist(), places.tolist(), strict=True):
        held = order.window_units(epoch, window)
        units.append(int(held[np.searchsorted(np.cumsum(sizes[held]), place, side="right")]))
    assert len(set(windows[:100].tolist())) > 1
    assert units[:100] == sorted(units[:100])
    assert units[100:] == sorted(units[100:])
