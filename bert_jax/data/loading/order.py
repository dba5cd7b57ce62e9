"""The order in which an epoch goes through a dataset, without a table of its rows.

Rows come in units that are read whole. Every epoch shuffles the units, takes them WINDOW at a time, and shuffles the
rows of such a window together. Units are random samples of the corpus already, so a window is one as well.
"""

import numpy as np

from bert_jax.data.hashing import key_from, permute, random_bits

WINDOW = 64
"""Units whose rows are shuffled together: they are in memory together."""


class EpochOrder:
    """Where each row of an endless sequence of epochs lies: a pure function of (unit sizes, key, row).

    Attributes:
      size: rows an epoch.
    """

    def __init__(self, unit_sizes: np.ndarray, key: int):
        """`unit_sizes` int64 [U]: rows in each unit; `key` names the order."""
        self.unit_sizes = unit_sizes
        self.size = int(unit_sizes.sum())
        self._key = key
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._windows: dict[tuple[int, int], np.ndarray] = {}

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Epoch, window, and place in `window_units` joined, each int64 [n], of rows int64 [n] counted from the start.

        Row i is in epoch i // size: every row is seen once in each.
        """
        epochs, within = np.divmod(rows, self.size)
        windows, places = np.empty_like(rows), np.empty_like(rows)
        for epoch in np.unique(epochs).tolist():
            _, starts = self._epoch(epoch)
            chosen = np.nonzero(epochs == epoch)[0]
            windows[chosen] = np.searchsorted(starts, within[chosen], side="right") - 1
            for window in np.unique(windows[chosen]).tolist():
                inside = chosen[windows[chosen] == window]
                places[inside] = self._shuffled(epoch, window)[within[inside] - starts[window]]
        return epochs, windows, places

    def window_units(self, epoch: int, window: int) -> np.ndarray:
        """The units of a window, int64 [at most WINDOW], in the order in which `locate` counts their rows."""
        units, _ = self._epoch(epoch)
        return units[window * WINDOW : (window + 1) * WINDOW]

    def _shuffled(self, epoch: int, window: int) -> np.ndarray:
        """The rows of a window in an order of their own."""
        if (epoch, window) not in self._windows:
            if len(self._windows) > 1:
                self._windows.clear()
            _, starts = self._epoch(epoch)
            rows = np.arange(starts[window + 1] - starts[window], dtype=np.uint64)
            key = np.uint64(key_from(self._key, epoch, window))
            self._windows[epoch, window] = np.argsort(random_bits(key, rows), kind="stable")
        return self._windows[epoch, window]

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The units in an epoch's order, and the row at which each window begins, and the last ends."""
        if epoch not in self._epochs:
            if len(self._epochs) > 1:
                self._epochs.clear()
            units = permute(np.arange(len(self.unit_sizes)), len(self.unit_sizes), key_from(self._key, epoch))
            ends = np.cumsum(self.unit_sizes[units])
            self._epochs[epoch] = units, np.concatenate([[0], ends[WINDOW - 1 : -1 : WINDOW], ends[-1:]])
        return self._epochs[epoch]
