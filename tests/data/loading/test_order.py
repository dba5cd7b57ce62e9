"""Shuffling: each epoch has its own order of units and of the rows in each window."""

import numpy as np
import pytest

from bert_jax.data.loading.order import WINDOW, EpochOrder


@pytest.mark.parametrize("units", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 5])
def test_windows_hold_every_unit_once_in_a_new_order(units):
    sizes = np.random.default_rng(units).integers(1, 9, units)
    order = EpochOrder(sizes, key=3)
    windows = -(-units // WINDOW)
    orders = []
    for epoch in range(3):
        held = [order.window_units(epoch, window) for window in range(windows)]
        orders.append(np.concatenate(held))
        assert sorted(orders[-1].tolist()) == list(range(units))
        rows = epoch * order.size + np.arange(order.size)
        epochs, window_of, places = order.locate(rows)
        assert (epochs == epoch).all()
        assert (np.diff(window_of) >= 0).all()
        for window, its_units in enumerate(held):
            its_places = places[window_of == window]
            assert sorted(its_places.tolist()) == list(range(int(sizes[its_units].sum())))
    if units > 10:
        assert (orders[0] != orders[1]).mean() > 0.8
        assert (orders[0] != np.arange(units)).mean() > 0.8


def test_windows_of_an_epoch_are_shuffled_each_in_its_own_way():
    order = EpochOrder(np.full(2 * WINDOW, 4), key=3)
    _, windows, places = order.locate(np.arange(order.size))
    assert (places[windows == 0] != places[windows == 1]).mean() > 0.9
