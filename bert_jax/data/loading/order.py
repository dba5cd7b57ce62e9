"""Shuffled order of the rows in each epoch, computed without a table of all rows.

Rows are grouped in units, which are read at once. Every epoch shuffles the units, splits them into windows of WINDOW
units, and shuffles the rows of each window. Units are random samples of the corpus, so windows are, too.
"""

import numpy as np

from bert_jax.data.hashing import key_from, permute, random_bits

WINDOW = 64
"""Units in a window; their rows are in memory together and shuffled together."""


class EpochOrder:
    """Locates each row of an endless sequence of epochs: a pure function of (unit sizes, key, row).

    Attributes:
      size: rows in an epoch.
    """

    def __init__(self, unit_sizes: np.ndarray, key: int):
        """`unit_sizes` int64 [U]: rows in each unit; `key` is the random key of the order."""
        self.unit_sizes = unit_sizes
        self.size = int(unit_sizes.sum())
        self._key = key
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._windows: dict[tuple[int, int], np.ndarray] = {}

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns epoch, window, and position in the concatenated `window_units` of rows int64 [n], each int64 [n].

        Row i is in epoch i // size; each epoch contains every row once.
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
        """Returns the units of a window, int64 [at most WINDOW], in the order that `locate` refers to."""
        units, _ = self._epoch(epoch)
        return units[window * WINDOW : (window + 1) * WINDOW]

    def _shuffled(self, epoch: int, window: int) -> np.ndarray:
        """Returns a permutation of the rows of a window."""
        if (epoch, window) not in self._windows:
            if len(self._windows) > 1:
                self._windows.clear()
            _, starts = self._epoch(epoch)
            rows = np.arange(starts[window + 1] - starts[window], dtype=np.uint64)
            key = np.uint64(key_from(self._key, epoch, window))
            self._windows[epoch, window] = np.argsort(random_bits(key, rows), kind="stable")
        return self._windows[epoch, window]

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the units in the order of an epoch, and the first row of each window followed by the epoch's size."""
        if epoch not in self._epochs:
            if len(self._epochs) > 1:
                self._epochs.clear()
            units = permute(np.arange(len(self.unit_sizes)), len(self.unit_sizes), key_from(self._key, epoch))
            ends = np.cumsum(self.unit_sizes[units])
            self._epochs[epoch] = units, np.concatenate([[0], ends[WINDOW - 1 : -1 : WINDOW], ends[-1:]])
        return self._epochs[epoch]
