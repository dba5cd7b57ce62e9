"""Shuffled order of the rows in each epoch, computed without a table of all rows.

Rows are grouped in units, which are read at once. Every epoch shuffles the units, splits them into windows, and
shuffles the rows of each window. Units are random samples of the corpus, so windows are, too.

In the order of version 2 every window has one unit of each part of the dataset, and a batch has its rows in the order
of the units: a process that makes some rows of a batch reads few units, and the same parts of the dataset in each step.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

import numpy as np

from bert_jax.data.hashing import key_from, permute, random_bits
from bert_jax.errors import InputError

WINDOW_BLOCKS = 64
"""Blocks in a window; their rows are shuffled together."""

_PLACE_BITS = 24  # of a row in a window, which has at most 64 x 512 rows
_EPOCHS, _WINDOWS = 4, 16  # whose units and permutations are kept; a batch and those ahead of it share them

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class OrderRules:
    """Rules of a version of the order.

    Attributes:
      packed_blocks: blocks that are packed together, the unit of packed rows; that of others is a block.
      packed_window: units in a window of packed rows.
      is_stratified: windows have a unit of each part of the dataset, and batches are in the order of the units.
    """

    packed_blocks: int
    packed_window: int
    is_stratified: bool


ORDERS = {
    1: OrderRules(packed_blocks=16, packed_window=64, is_stratified=False),
    2: OrderRules(packed_blocks=2, packed_window=WINDOW_BLOCKS // 2, is_stratified=True),
}
"""Rules by version: a run keeps those that it began with (`row_order` of its config)."""

NEWEST_ORDER = max(ORDERS)
FIRST_ORDER = min(ORDERS)
"""The version of runs that recorded none."""


def order_rules(version: int) -> OrderRules:
    """Returns the rules of a version. Raises InputError for an unknown one."""
    if version not in ORDERS:
        raise InputError(f"row_order={version!r}: unknown version; expected {' or '.join(map(str, sorted(ORDERS)))}")
    return ORDERS[version]


class EpochOrder:
    """Locates each row of an endless sequence of epochs: a pure function of (unit sizes, key, row).

    Attributes:
      size: rows in an epoch.
      window_rows: mean number of rows in a window.
    """

    def __init__(self, unit_sizes: np.ndarray, key: int, *, window: int, is_stratified: bool):
        """Creates the order.

        Args:
          unit_sizes: int64 [U], rows in each unit.
          key: the random key.
          window: units in a window.
          is_stratified: each window has one unit of each of `window` equal parts of the dataset.
        """
        self.unit_sizes = unit_sizes
        self.size = int(unit_sizes.sum())
        self._window = window
        self._is_stratified = is_stratified
        self.window_rows = self.size / -(-len(unit_sizes) // window)
        self._key = key
        self._epochs: Recent[int, tuple[np.ndarray, np.ndarray]] = Recent(_EPOCHS, self._make_epoch)
        self._shuffled: Recent[tuple[int, int], np.ndarray] = Recent(_WINDOWS, self._shuffle)
        self._unit_keys: Recent[tuple[int, int], np.ndarray] = Recent(_WINDOWS, self._make_unit_keys)

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns epoch, window, and position in the concatenated `window_units` of rows int64 [n], each int64 [n].

        Row i is in epoch i // size; each epoch contains every row once.
        """
        epochs, within = np.divmod(rows, self.size)
        windows, places = np.empty_like(rows), np.empty_like(rows)
        for epoch in np.unique(epochs).tolist():
            _, starts = self._epochs[epoch]
            chosen = np.nonzero(epochs == epoch)[0]
            windows[chosen] = np.searchsorted(starts, within[chosen], side="right") - 1
            for window in np.unique(windows[chosen]).tolist():
                inside = chosen[windows[chosen] == window]
                places[inside] = self._shuffled[epoch, window][within[inside] - starts[window]]
        return epochs, windows, places

    def window_units(self, epoch: int, window: int) -> np.ndarray:
        """Returns the units of a window, int64 [at most the window's size], in the order that `locate` refers to."""
        units, _ = self._epochs[epoch]
        return units[window * self._window : (window + 1) * self._window]

    def sort_by_unit(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows int64 [n] by epoch, then in the order of units and of the rows in a unit."""
        if not len(rows):  # of a dataset that has no row in a mixture's batch
            return rows
        rows = np.sort(rows)
        parts = []
        for epoch in range(int(rows[0]) // self.size, int(rows[-1]) // self.size + 1):
            starts = self._epochs[epoch][1]
            bounds = np.searchsorted(rows, epoch * self.size + starts)
            keys = [
                self._unit_keys[epoch, window][rows[first:stop] - (epoch * self.size + starts[window])]
                for window, (first, stop) in enumerate(itertools.pairwise(bounds.tolist()))
                if first < stop
            ]
            parts.append(rows[bounds[0] : bounds[-1]][np.argsort(np.concatenate(keys))])
        return np.concatenate(parts)

    def _make_unit_keys(self, key: tuple[int, int]) -> np.ndarray:
        """Returns a key for each row of a window, in shuffled order: that of its unit, then of its place in it."""
        places, units = self._shuffled[key], self.window_units(*key)
        unit_of = np.repeat(units, self.unit_sizes[units])
        result: np.ndarray = (unit_of << _PLACE_BITS | np.arange(len(unit_of)))[places]
        return result

    def _shuffle(self, key: tuple[int, int]) -> np.ndarray:
        """Returns a permutation of the rows of a window."""
        epoch, window = key
        _, starts = self._epochs[epoch]
        rows = np.arange(starts[window + 1] - starts[window], dtype=np.uint64)
        return np.argsort(random_bits(np.uint64(key_from(self._key, epoch, window)), rows), kind="stable")

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the units in the order of an epoch, and the first row of each window followed by the epoch's size."""
        count, key = len(self.unit_sizes), key_from(self._key, epoch)
        units = self._stratify(key) if self._is_stratified else permute(np.arange(count), count, key)
        ends = np.cumsum(self.unit_sizes[units])
        return units, np.concatenate([[0], ends[self._window - 1 : -1 : self._window], ends[-1:]])

    def _stratify(self, key: int) -> np.ndarray:
        """Returns the units by window, and in it by part; the last window lacks the parts that have one unit less."""
        count = len(self.unit_sizes)
        sizes = np.array([len(part) for part in np.array_split(np.empty(count, np.int8), self._window)])
        part_of = np.repeat(np.arange(self._window), sizes)
        shuffled = np.lexsort((random_bits(np.uint64(key), np.arange(count, dtype=np.uint64)), part_of))
        window_of = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return shuffled[np.lexsort((part_of, window_of))]


def group_by_window(epochs: np.ndarray, windows: np.ndarray) -> Iterator[tuple[int, int, np.ndarray | slice]]:
    """Yields epoch and window of rows [n], and the rows that are in it: their places, or a slice for all of them."""
    keys, of_row = np.unique(epochs << 40 | windows, return_inverse=True)
    for number, key in enumerate(keys.tolist()):
        yield key >> 40, key & (1 << 40) - 1, slice(None) if len(keys) == 1 else np.nonzero(of_row == number)[0]


class Recent(Generic[K, T]):
    """Makes the values of keys, and keeps the most recent ones; thread-safe."""

    def __init__(self, kept: int, make: Callable[[K], T]):
        self._kept, self._make = kept, make
        self._values: OrderedDict[K, T] = OrderedDict()
        self._lock = Lock()

    def __getitem__(self, key: K) -> T:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = self._make(key)
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._kept:
                self._values.popitem(last=False)
        return value
