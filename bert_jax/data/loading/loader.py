"""Batches of a prepared dataset, each a pure function of (dataset, seed, step).

The loaders are stateless: a run resumes from one integer, and any process can compute any rows of any batch.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from bert_jax.batch import HostBatch, map_arrays
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.hashing import key_from
from bert_jax.data.loading.masking import Masking, mask_batch, mask_keys, prediction_counts
from bert_jax.data.loading.mixture import Mixture, row_shares
from bert_jax.data.loading.order import EpochOrder
from bert_jax.data.loading.packing import most_predictions, pack, pack_batch, pack_lengths
from bert_jax.data.records import Instances, Unmasked, pad_batch, sequence_lengths
from bert_jax.errors import InputError

_PACKED_BLOCKS = 16  # blocks packed together: a few thousand instances, enough for a dense packing


def _make_batch(
    dataset: PreparedDataset, instances: Unmasked, masking: Masking | None, mask_key: int, mask_round: int
) -> HostBatch:
    """Returns the batch layout of the model; an unpacked row is a pack of one sequence (K = 1)."""
    input_ids, sequence_ids, tokenizer = instances["input_ids"], instances["sequence_ids"], dataset.tokenizer
    if masking is None:
        targets = next_token_targets(input_ids, sequence_ids)
    else:
        targets = mask_batch(
            input_ids,
            instances["maskable"],
            sequence_ids.sum(axis=1),
            mask_keys(instances["instance_ids"], mask_key, mask_round),
            masking,
            mask_id=tokenizer.mask_id,
            vocab_size=tokenizer.vocab_size,
            continues_word=tokenizer.continues_word(input_ids) if masking.whole_word else None,
        )
    return {
        "token_type_ids": instances["token_type_ids"],
        "positions": instances["positions"],
        "sequence_ids": sequence_ids,
        "input_ids": targets["input_ids"],
        "masked_positions": targets["masked_positions"],
        "masked_ids": targets["masked_ids"],
        "masked_weights": targets["masked_weights"],
        "cls_positions": np.zeros((len(input_ids), 1), np.int32),
        "next_sentence_labels": instances["is_random_next"][:, None].astype(np.int32),
        "next_sentence_weights": (~instances["is_single"][:, None]).astype(np.float32),
    }


def predictions_per_row(masking: Masking | None, seq_len: int, max_sequences: int) -> int:
    """Returns P, the maximum number of predictions in a row of at most `max_sequences` sequences.

    Without masking every token is predicted. Raises InputError if `data.max_predictions` exceeds the sequence length.
    """
    if masking is None:
        return seq_len
    if masking.max_predictions > seq_len:
        raise InputError(
            f"data.max_predictions={masking.max_predictions}: a sequence has {seq_len} tokens; use 1 to {seq_len}, or "
            f"-1 for the share objective.mask_rate, {prediction_counts(seq_len, masking.mask_rate)} predictions"
        )
    return (
        masking.slots(seq_len) if max_sequences == 1 else most_predictions(masking.predictions, seq_len, max_sequences)
    )


def next_token_targets(input_ids: np.ndarray, sequence_ids: np.ndarray) -> HostBatch:
    """Returns the targets of a left-to-right model: at each position the next token of its sequence, without masking.

    From `input_ids`, `sequence_ids` [B, L] it computes `input_ids`, `masked_positions`, `masked_ids` and
    `masked_weights` of a `Batch` with P = L. The last token of a sequence and the padding have weight 0.
    """
    rows, length = input_ids.shape
    follows = np.zeros((rows, length), bool)
    follows[:, :-1] = (sequence_ids[:, :-1] == sequence_ids[:, 1:]) & (sequence_ids[:, :-1] > 0)
    next_ids = np.zeros_like(input_ids)
    next_ids[:, :-1] = input_ids[:, 1:]
    return {
        "input_ids": input_ids,
        "masked_positions": np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)).copy(),
        "masked_ids": np.where(follows, next_ids, 0).astype(np.int32),
        "masked_weights": follows.astype(np.float32),
    }


_unit_sizes: WeakKeyDictionary[PreparedDataset, dict[int, np.ndarray]] = WeakKeyDictionary()


def unit_sizes(dataset: PreparedDataset, max_sequences: int) -> np.ndarray:
    """Returns int64 [U], the rows of at most `max_sequences` sequences in each unit of a training split.

    A unit is the amount read at once: a block, or the blocks that are packed together. Raises InputError for an empty
    split.
    """
    sizes = dataset.block_sizes("train")
    if not len(sizes):
        raise InputError(f"{dataset.folder}: the train split has no instances; prepare the dataset from more text")
    if max_sequences == 1:
        return sizes
    cached = _unit_sizes.setdefault(dataset, {})
    if max_sequences not in cached:
        starts = np.cumsum(sizes) - sizes
        lengths = np.split(dataset.lengths("train"), starts[_PACKED_BLOCKS::_PACKED_BLOCKS])
        packings = [pack_lengths(unit, dataset.info.seq_len, max_sequences) for unit in lengths]
        cached[max_sequences] = np.array([sum(count for count, _ in packing) for packing in packings])
    return cached[max_sequences]


def epoch_size(dataset: PreparedDataset, max_sequences: int) -> int:
    """Returns the rows of at most `max_sequences` sequences in an epoch. Raises InputError for an empty split."""
    return int(unit_sizes(dataset, max_sequences).sum())


@dataclass(frozen=True)
class _Window:
    """The part of a dataset in memory: the instances of some blocks, and their packs, if any."""

    blocks: np.ndarray
    instances: Instances
    packs: np.ndarray | None  # [R, K] of indices into `instances`, -1 for an empty slot


class TrainRows:
    """Endless sequence of the rows of one training split, shuffled in every epoch.

    Row i is row i % size of epoch i // size, and an epoch contains every instance once. Masks are drawn anew in every
    epoch, or repeat after `static_masks` epochs. A row is an instance, or a pack of instances if `max_sequences` > 1.

    Attributes:
      dataset: the prepared dataset.
      size: rows in an epoch.
      max_sequences: K, the maximum number of sequences in a row.
      predictions: P, the maximum number of predictions in a row.
      real_share: mean share of tokens in a row that are not padding.
    """

    def __init__(
        self,
        dataset: PreparedDataset,
        *,
        seed: int,
        masking: Masking | None,
        static_masks: int = 0,
        max_sequences: int = 1,
    ):
        """Raises InputError if the training split is empty.

        Args:
          dataset: the prepared dataset.
          seed: of order and masks.
          masking: the masking rule; None for left-to-right rows, see `next_token_targets`.
          static_masks: 0 for new masks in every epoch; k repeats the masks of k epochs, as in a dataset that was masked
            k times in advance.
          max_sequences: K, the maximum number of instances in a row.
        """
        if max_sequences < 1:
            raise InputError(f"data.max_sequences={max_sequences}: must be at least 1")
        sizes = dataset.block_sizes("train")
        self.dataset = dataset
        self._masking = masking
        self._static_masks = static_masks
        self.max_sequences = max_sequences
        self._seq_len = dataset.info.seq_len
        self._keys = {name: key_from(dataset.info.hash, seed, name) for name in ("order", "mask", "pack")}
        self._starts = np.cumsum(sizes) - sizes
        self._blocks_a_unit = 1 if max_sequences == 1 else _PACKED_BLOCKS
        self.predictions = predictions_per_row(masking, self._seq_len, max_sequences)
        self._order = EpochOrder(unit_sizes(dataset, max_sequences), self._keys["order"])
        self.size = self._order.size
        self.real_share = float(dataset.lengths("train").sum(dtype=np.int64)) / (self.size * self._seq_len)
        self._windows: dict[tuple[int, int], _Window] = {}

    def rows(self, numbers: np.ndarray) -> HostBatch:
        """Returns the rows `numbers` int64 [n]: the inputs of the model and the targets of pre-training."""
        epochs, windows, places = self._order.locate(numbers)
        parts = []
        for group in _window_groups(epochs, windows):
            epoch, window = int(epochs[group.start]), self._window(int(epochs[group.start]), int(windows[group.start]))
            picked = places[group]
            if window.packs is None:
                parts.append(self._sequences(window, picked, epoch))
                continue
            packs = window.packs[picked]
            is_used = packs >= 0
            slots = np.where(is_used, np.cumsum(is_used).reshape(packs.shape) - 1, -1)
            sequences = self._sequences(window, packs[is_used], epoch)
            parts.append(pack_batch(sequences, slots, self._seq_len, self.predictions, self.dataset.tokenizer.pad_id))
        return parts[0] if len(parts) == 1 else map_arrays(lambda *arrays: np.concatenate(arrays), *parts)

    def instances(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the instances in rows `numbers` [n], int64 [n, K] with -1 for empty slots, and the epochs [n]."""
        epochs, windows, places = self._order.locate(numbers)
        parts = []
        for group in _window_groups(epochs, windows):
            window = self._window(int(epochs[group.start]), int(windows[group.start]))
            sizes = self.dataset.block_sizes("train")[window.blocks]
            index = np.repeat(self._starts[window.blocks] - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
            packs = places[group, None] if window.packs is None else window.packs[places[group]]
            parts.append(np.where(packs >= 0, index[packs], -1))
        return np.concatenate(parts), epochs

    def _sequences(self, window: _Window, which: np.ndarray, epoch: int) -> HostBatch:
        instances = pad_batch(window.instances, which, self._seq_len, self.dataset.tokenizer)
        mask_round = epoch % self._static_masks if self._static_masks else epoch
        return _make_batch(self.dataset, instances, self._masking, self._keys["mask"], mask_round)

    def _window(self, epoch: int, number: int) -> _Window:
        """Returns a window from a cache of the last two."""
        windows = self._windows  # another thread may replace it
        if (epoch, number) not in windows:
            windows = {**dict(list(windows.items())[-1:]), (epoch, number): self._read(epoch, number)}
            self._windows = windows
        return windows[epoch, number]

    def _read(self, epoch: int, number: int) -> _Window:
        units = self._order.window_units(epoch, number)
        all_blocks = np.arange(len(self._starts))
        blocks = [all_blocks[unit * self._blocks_a_unit : (unit + 1) * self._blocks_a_unit] for unit in units.tolist()]
        instances = self.dataset.read_blocks("train", np.concatenate(blocks))
        if self.max_sequences == 1:
            return _Window(np.concatenate(blocks), instances, None)
        lengths = sequence_lengths(instances.headers)
        packs, first = [], 0
        for unit, unit_blocks in zip(units.tolist(), blocks, strict=True):
            stop = first + int(self.dataset.block_sizes("train")[unit_blocks].sum())
            key = key_from(self._keys["pack"], epoch, unit)
            packed = pack(lengths[first:stop], self._seq_len, self.max_sequences, key)
            packs.append(np.where(packed >= 0, packed + first, -1))
            first = stop
        return _Window(np.concatenate(blocks), instances, np.concatenate(packs))


def _window_groups(epochs: np.ndarray, windows: np.ndarray) -> list[slice]:
    """Returns the ranges of consecutive rows that are in one window."""
    changes = np.nonzero((np.diff(epochs) != 0) | (np.diff(windows) != 0))[0] + 1
    bounds = [0, *changes.tolist(), len(epochs)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def _from_sources(source_of: np.ndarray, source_rows: Callable[[int, np.ndarray], HostBatch]) -> HostBatch:
    """Makes a batch whose row i is from source `source_of[i]`; `source_rows` makes those of a source where True [B]."""
    sources = [(index, source_of == index) for index in np.unique(source_of).tolist()]

    def interleave(*arrays: np.ndarray) -> np.ndarray:
        rows = np.empty((len(source_of), *arrays[0].shape[1:]), arrays[0].dtype)
        for (_, chosen), array in zip(sources, arrays, strict=True):
            rows[chosen] = array
        return rows

    return map_arrays(interleave, *(source_rows(*source) for source in sources))


def make_mixture(datasets: Sequence[PreparedDataset], shares: Sequence[float], seed: int) -> Mixture:
    """Returns the mixture of the rows of `datasets` with `shares` that sum to 1."""
    return Mixture(shares, key_from(seed, "mixture", *(dataset.info.hash for dataset in datasets)))


class TrainLoader:
    """Training batches of B rows, from one dataset or a mixture of several.

    `batch(step)` is a pure function of the constructor's arguments and the step.

    Attributes:
      sequences_a_row: mean number of sequences in a row.
      real_share: mean share of tokens in a row that are not padding.
    """

    def __init__(
        self,
        sources: Sequence[TrainRows],
        *,
        seed: int,
        global_batch_size: int,
        weights: Sequence[float] = (),
        first_step: int = 0,
        first_row: int = 0,
        first_rows: Sequence[int] = (),
    ):
        """Creates the loader; it may start in the middle of a run.

        Args:
          sources: one or more sources of equal sequence length.
          seed: of the mixture.
          global_batch_size: B.
          weights: relative shares of the sources in the rows, above 0; by default proportional to their sizes.
          first_step: the step of the batch that begins with row `first_row`.
          first_row: global index of that batch's first row in the mixture.
          first_rows: index of each source's first row; by default the number of its rows before `first_row`.
        """
        self.sources = list(sources)
        self.global_batch_size = global_batch_size
        self._offset = first_row - first_step * global_batch_size
        shares = row_shares([source.size for source in sources], weights)
        self.sequences_a_row = sum(
            share * source.dataset.size("train") / source.size for share, source in zip(shares, sources, strict=True)
        )
        self.real_share = sum(share * source.real_share for share, source in zip(shares, sources, strict=True))
        self._mixture = make_mixture([source.dataset for source in sources], shares, seed)
        mixed = self._mixture.counts(first_row)
        self._source_offsets = [first - before for first, before in zip(first_rows or mixed, mixed, strict=True)]

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> HostBatch:
        """Returns rows `rows` of batch `step` in the layout of `TrainRows.rows`."""
        source_of, numbers = self._locate(step, rows)
        if len(self.sources) == 1:
            return self.sources[0].rows(numbers)
        return _from_sources(source_of, lambda index, chosen: self.sources[index].rows(numbers[chosen]))

    def instances(self, step: int, rows: slice | np.ndarray = slice(None)) -> dict[str, np.ndarray]:
        """Returns the instances in rows `rows` [n] of batch `step`: `source`, `instances` and `epoch`.

        `source` int64 [n] is the index in `sources`, `instances` int64 [n, K] those of its training split, -1 for an
        empty slot.
        """
        source_of, numbers = self._locate(step, rows)
        found = np.full((len(numbers), max(source.max_sequences for source in self.sources)), -1, np.int64)
        epochs = np.zeros(len(numbers), np.int64)
        for index in np.unique(source_of).tolist():
            chosen = source_of == index
            inside, epochs[chosen] = self.sources[index].instances(numbers[chosen])
            found[chosen, : inside.shape[1]] = inside
        return {"source": source_of, "instances": found, "epoch": epochs}

    def _locate(self, step: int, rows: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each row [n] of a batch, and the index of the row in it."""
        numbers = (self._offset + step * self.global_batch_size + np.arange(self.global_batch_size))[rows]
        source_of = np.zeros(len(numbers), np.int64)
        if len(self.sources) > 1:
            source_of, numbers = self._mixture.locate(numbers)
        return source_of, numbers + np.array(self._source_offsets, np.int64)[source_of]

    def next_rows(self, step: int) -> list[int]:
        """Returns the index of each source's first row in batch `step` or later."""
        mixed = self._mixture.counts(self._offset + step * self.global_batch_size)
        return [count + offset for count, offset in zip(mixed, self._source_offsets, strict=True)]

    def epochs(self, step: int) -> list[float]:
        """Returns the number of epochs of each source before batch `step`."""
        return [row / source.size for row, source in zip(self.next_rows(step), self.sources, strict=True)]


class EvalLoader:
    """Evaluation batches of one or more datasets, with a fixed order and fixed masks.

    Instances keep their stored order; those of several datasets are interleaved evenly. A mask depends only on the
    dataset's seed and the instance. Masks are always 80/10/10 of 15%, so that evaluations of different runs are
    comparable.
    """

    def __init__(
        self,
        datasets: Sequence[PreparedDataset],
        *,
        batch_size: int,
        batches: int = -1,
        left_to_right: bool = False,
    ):
        """Creates at most `batches` batches of `batch_size` rows, all of the split for -1.

        `left_to_right` batches are not masked; see `next_token_targets`.
        """
        self.datasets = list(datasets)
        self.batch_size = batch_size
        self.masking = None if left_to_right else Masking()
        sizes = [dataset.size("eval") for dataset in datasets]
        order = np.argsort(np.concatenate([(np.arange(size) + 0.5) / size for size in sizes]), kind="stable")
        self._source = np.repeat(np.arange(len(sizes)), sizes)[order]
        self._index = np.concatenate([np.arange(size) for size in sizes])[order]
        available = -(-len(order) // batch_size)
        self.batches = available if batches < 0 else min(batches, available)

    def batch(self, number: int, rows: slice | np.ndarray = slice(None)) -> HostBatch:
        """Returns rows of eval batch `number` as `TrainRows.rows` does; rows after the split's end have weight 0."""
        positions = (number * self.batch_size + np.arange(self.batch_size))[rows]
        real = positions < len(self._source)
        positions = np.minimum(positions, len(self._source) - 1)

        def source_rows(index: int, chosen: np.ndarray) -> HostBatch:
            dataset = self.datasets[index]
            instances = dataset.instances("eval", self._index[positions[chosen]])
            return _make_batch(dataset, instances, self.masking, key_from(dataset.info.seed, "eval mask"), 0)

        batch = _from_sources(self._source[positions], source_rows)
        batch["masked_weights"] *= real[:, None]
        batch["next_sentence_weights"] *= real[:, None]
        return batch

    def __iter__(self) -> Iterator[HostBatch]:
        return (self.batch(number) for number in range(self.batches))
