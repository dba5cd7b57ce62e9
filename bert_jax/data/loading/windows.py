"""Windows of a training split in memory: reads the units that are needed, and packs them.

A unit is the amount read at once: a block, or the blocks that are packed together.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np

from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.hashing import key_from
from bert_jax.data.loading.order import NEWEST_ORDER, EpochOrder, OrderRules, order_rules
from bert_jax.data.loading.packing import count_rows, pack
from bert_jax.data.records import Instances, join, sequence_lengths
from bert_jax.errors import InputError

_LEAST_KEPT = 3  # windows: two that a batch may have rows of, and the next one

_unit_sizes: WeakKeyDictionary[PreparedDataset, dict[tuple[int, int], np.ndarray]] = WeakKeyDictionary()


def blocks_a_unit(rules: OrderRules, max_sequences: int) -> int:
    """Returns the number of blocks in a unit of rows of at most `max_sequences` sequences."""
    return 1 if max_sequences == 1 else rules.packed_blocks


def unit_sizes(dataset: PreparedDataset, max_sequences: int, row_order: int = NEWEST_ORDER) -> np.ndarray:
    """Returns int64 [U], the rows of at most `max_sequences` sequences in each unit of a training split.

    `row_order` is the version of the order. Raises InputError for an empty split.
    """
    sizes = dataset.block_sizes("train")
    if not len(sizes):
        raise InputError(f"{dataset.folder}: the train split has no instances; prepare the dataset from more text")
    if max_sequences == 1:
        return sizes
    blocks = blocks_a_unit(order_rules(row_order), max_sequences)
    cached = _unit_sizes.setdefault(dataset, {})
    if (max_sequences, blocks) not in cached:
        starts = (np.cumsum(sizes) - sizes)[blocks::blocks]
        lengths = np.split(dataset.lengths("train"), starts)
        cached[max_sequences, blocks] = np.array(
            [count_rows(unit, dataset.info.seq_len, max_sequences) for unit in lengths]
        )
    return cached[max_sequences, blocks]


def epoch_size(dataset: PreparedDataset, max_sequences: int, row_order: int = NEWEST_ORDER) -> int:
    """Returns the rows of at most `max_sequences` sequences in an epoch. Raises InputError for an empty split."""
    return int(unit_sizes(dataset, max_sequences, row_order).sum())


@dataclass(frozen=True)
class Window:
    """The units of a window that are in memory.

    Attributes:
      firsts: int64 [W + 1], the first row of each unit in the window, and the number of rows.
      loaded: int64 [W], index of each unit's first row in `packs`, or in `instances` without packs; -1 if not read.
      blocks: the blocks of the instances, in order.
      instances: the instances of the units that were read.
      packs: int64 [R, K] of indices into `instances`, -1 for an empty slot; None without packing.
    """

    firsts: np.ndarray
    loaded: np.ndarray
    blocks: np.ndarray
    instances: Instances | None
    packs: np.ndarray | None

    def units_of(self, places: np.ndarray) -> np.ndarray:
        """Returns the unit, by its index in the window, of rows [n]."""
        return np.searchsorted(self.firsts, places, side="right") - 1

    def sequences(self, places: np.ndarray) -> np.ndarray:
        """Returns indices into `instances` of rows [n], whose units were read: int64 [n, K], -1 for an empty slot."""
        units = self.units_of(places)
        rows = self.loaded[units] + places - self.firsts[units]
        result: np.ndarray = rows[:, None] if self.packs is None else self.packs[rows]
        return result


@dataclass
class _Entry:
    window: Window
    lock: Lock = field(default_factory=Lock)


class Windows:
    """Reads units of windows once, and keeps those of the most recent windows; thread-safe."""

    def __init__(self, dataset: PreparedDataset, order: EpochOrder, *, blocks: int, max_sequences: int, pack_key: int):
        """Creates an empty cache.

        Args:
          dataset: the prepared dataset.
          order: the order of its units of `blocks` blocks.
          blocks: blocks in a unit.
          max_sequences: K, the maximum number of sequences in a row.
          pack_key: the random key of the packing.
        """
        self._dataset, self._order, self._blocks = dataset, order, blocks
        self._max_sequences, self._pack_key = max_sequences, pack_key
        self._kept = _LEAST_KEPT
        self._entries: OrderedDict[tuple[int, int], _Entry] = OrderedDict()
        self._lock = Lock()

    def keep(self, windows: int) -> None:
        """Keeps at least the windows of two batches that have rows of `windows` windows each."""
        self._kept = max(self._kept, 2 * windows + 1)

    def get(self, epoch: int, number: int, places: np.ndarray) -> Window:
        """Returns a window with, at least, the units of its rows `places` [n]."""
        with self._lock:
            entry = self._entries.get((epoch, number))
            if entry is None:
                entry = self._entries[epoch, number] = _Entry(self._empty(epoch, number))
            self._entries.move_to_end((epoch, number))
            while len(self._entries) > self._kept:
                self._entries.popitem(last=False)
        with entry.lock:
            window = entry.window
            needed = np.unique(window.units_of(places))
            if 2 * len(needed) > len(window.loaded):
                needed = np.arange(len(window.loaded))  # the other batches of the window will need the rest
            missing = needed[window.loaded[needed] < 0]
            if len(missing):
                entry.window = window = self._extend(window, epoch, number, missing)
            return window

    def blocks_of(self, epoch: int, number: int, places: np.ndarray) -> np.ndarray:
        """Returns the blocks int64 [n] of the units of a window's rows `places`; reads nothing."""
        window = self._empty(epoch, number)
        units = self._order.window_units(epoch, number)[np.unique(window.units_of(places))]
        return np.concatenate([self._unit_blocks(unit) for unit in units.tolist()])

    def _empty(self, epoch: int, number: int) -> Window:
        sizes = self._order.unit_sizes[self._order.window_units(epoch, number)]
        firsts = np.concatenate([[0], np.cumsum(sizes)])
        return Window(firsts, np.full(len(sizes), -1), np.zeros(0, np.int64), None, None)

    def _unit_blocks(self, unit: int) -> np.ndarray:
        last = len(self._dataset.block_sizes("train"))
        return np.arange(unit * self._blocks, min((unit + 1) * self._blocks, last))

    def _extend(self, window: Window, epoch: int, number: int, missing: np.ndarray) -> Window:
        """Reads the units `missing` of a window."""
        units = self._order.window_units(epoch, number)[missing].tolist()
        blocks = [self._unit_blocks(unit) for unit in units]
        read = self._dataset.read_blocks("train", np.concatenate(blocks))
        before = 0 if window.instances is None else len(window.instances)
        instances = read if window.instances is None else join([window.instances, read])
        loaded = window.loaded.copy()
        sizes = self._order.unit_sizes[units]
        all_blocks = np.concatenate([window.blocks, *blocks])
        if self._max_sequences == 1:
            loaded[missing] = before + np.cumsum(sizes) - sizes
            return Window(window.firsts, loaded, all_blocks, instances, None)
        lengths, first, packs = sequence_lengths(read.headers), 0, []
        for unit, its_blocks in zip(units, blocks, strict=True):
            stop = first + int(self._dataset.block_sizes("train")[its_blocks].sum())
            key = key_from(self._pack_key, epoch, unit)
            packed = pack(lengths[first:stop], self._dataset.info.seq_len, self._max_sequences, key)
            packs.append(np.where(packed >= 0, packed + first + before, -1))
            first = stop
        if window.packs is not None:
            packs.insert(0, window.packs)
        loaded[missing] = (0 if window.packs is None else len(window.packs)) + np.cumsum(sizes) - sizes
        return Window(window.firsts, loaded, all_blocks, instances, np.concatenate(packs))
