"""Batches of a prepared dataset, each a pure function of (dataset, seed, step).

The loaders are stateless: a run resumes from one integer, and any process can compute any rows of any batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bert_jax.batch import HostBatch, map_arrays
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.hashing import key_from
from bert_jax.data.loading.masking import Masking, mask_batch, mask_keys, prediction_counts
from bert_jax.data.loading.mixture import Mixture, row_shares
from bert_jax.data.loading.order import NEWEST_ORDER, WINDOW_BLOCKS, EpochOrder, Recent, group_by_window, order_rules
from bert_jax.data.loading.packing import most_predictions, pack_batch
from bert_jax.data.loading.prefetch import ReadAhead
from bert_jax.data.loading.windows import Window, Windows, blocks_a_unit, unit_sizes
from bert_jax.data.records import Unmasked, pad_batch
from bert_jax.errors import InputError

_RECENT_STEPS = 16  # whose row numbers are kept
_FETCHES_AHEAD = 8  # windows between a batch and the downloads for later ones
_READS_A_WINDOW = 8  # calls of the thread that reads ahead


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


class TrainRows:
    """Endless sequence of the rows of one training split, shuffled in every epoch.

    Row i is row i % size of epoch i // size, and an epoch contains every instance once. Masks are drawn anew in every
    epoch, or repeat after `static_masks` epochs. A row is an instance, or a pack of instances if `max_sequences` > 1.

    Attributes:
      dataset: the prepared dataset.
      size: rows in an epoch.
      window_rows: mean number of rows in a window, which are shuffled together.
      is_sorted: batches have their rows in the order of the units.
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
        row_order: int = NEWEST_ORDER,
    ):
        """Raises InputError if the training split is empty.

        Args:
          dataset: the prepared dataset.
          seed: of order and masks.
          masking: the masking rule; None for left-to-right rows, see `next_token_targets`.
          static_masks: 0 for new masks in every epoch; k repeats the masks of k epochs, as in a dataset that was masked
            k times in advance.
          max_sequences: K, the maximum number of instances in a row.
          row_order: version of the order, see `order.ORDERS`.
        """
        if max_sequences < 1:
            raise InputError(f"data.max_sequences={max_sequences}: must be at least 1")
        rules = order_rules(row_order)
        self.dataset = dataset
        self._masking = masking
        self._static_masks = static_masks
        self.max_sequences = max_sequences
        self._seq_len = dataset.info.seq_len
        self._keys = {name: key_from(dataset.info.hash, seed, name) for name in ("order", "mask", "pack")}
        self.predictions = predictions_per_row(masking, self._seq_len, max_sequences)
        self.is_sorted = rules.is_stratified
        self._order = EpochOrder(
            unit_sizes(dataset, max_sequences, row_order),
            self._keys["order"],
            window=WINDOW_BLOCKS if max_sequences == 1 else rules.packed_window,
            is_stratified=rules.is_stratified,
        )
        self._windows = Windows(
            dataset,
            self._order,
            blocks=blocks_a_unit(rules, max_sequences),
            max_sequences=max_sequences,
            pack_key=self._keys["pack"],
        )
        self.size = self._order.size
        self.window_rows = self._order.window_rows
        self.real_share = float(dataset.lengths("train").sum(dtype=np.int64)) / (self.size * self._seq_len)

    def in_batch_order(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the rows `numbers` int64 [n] of a batch in the order that they have in it."""
        return self._order.sort_by_unit(numbers) if self.is_sorted else numbers

    def rows(self, numbers: np.ndarray) -> HostBatch:
        """Returns the rows `numbers` int64 [n]: the inputs of the model and the targets of pre-training."""
        parts, places = [], []
        for epoch, window, chosen, sequences in self._located(numbers):
            places.append(chosen)
            parts.append(self._lay_out(window, sequences, epoch))
        return _assemble(len(numbers), parts, places)

    def instances(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the instances in rows `numbers` [n], int64 [n, K] with -1 for empty slots, and the epochs [n]."""
        sizes = self.dataset.block_sizes("train")
        starts = np.cumsum(sizes) - sizes
        found = np.empty((len(numbers), self.max_sequences), np.int64)
        for _, window, chosen, sequences in self._located(numbers):
            read = sizes[window.blocks]
            index = np.repeat(starts[window.blocks] - (np.cumsum(read) - read), read) + np.arange(read.sum())
            found[chosen] = np.where(sequences >= 0, index[sequences], -1)
        return found, numbers // self.size

    def prepare(self, numbers: np.ndarray) -> None:
        """Reads the rows `numbers` [n] into memory, for a later call of `rows`."""
        for _ in self._located(numbers):
            pass

    def fetch(self, numbers: np.ndarray) -> None:
        """Downloads what the rows `numbers` [n] of a remote dataset need, and reads nothing."""
        if self.dataset.is_remote:
            epochs, windows, places = self._order.locate(numbers)
            for epoch, number, chosen in group_by_window(epochs, windows):
                self.dataset.fetch_blocks("train", self._windows.blocks_of(epoch, number, places[chosen]))

    def _located(self, numbers: np.ndarray) -> Iterator[tuple[int, Window, np.ndarray | slice, np.ndarray]]:
        """Yields epoch and window of rows [n], the rows that are in it, and their sequences [rows, K] in the window."""
        epochs, windows, places = self._order.locate(numbers)
        groups = list(group_by_window(epochs, windows))
        self._windows.keep(len(groups))
        for epoch, number, chosen in groups:
            window = self._windows.get(epoch, number, places[chosen])
            yield epoch, window, chosen, window.sequences(places[chosen])

    def _lay_out(self, window: Window, packs: np.ndarray, epoch: int) -> HostBatch:
        assert window.instances is not None
        is_used = packs >= 0
        instances = pad_batch(window.instances, packs[is_used], self._seq_len, self.dataset.tokenizer)
        mask_round = epoch % self._static_masks if self._static_masks else epoch
        sequences = _make_batch(self.dataset, instances, self._masking, self._keys["mask"], mask_round)
        if self.max_sequences == 1:
            return sequences
        return pack_batch(sequences, is_used, self._seq_len, self.predictions, self.dataset.tokenizer.pad_id)


def _assemble(size: int, parts: Sequence[HostBatch], places: Sequence[np.ndarray | slice]) -> HostBatch:
    """Makes a batch of `size` rows whose rows `places[i]` are `parts[i]`."""
    if len(parts) == 1:
        return parts[0]

    def fill(*arrays: np.ndarray) -> np.ndarray:
        rows = np.empty((size, *arrays[0].shape[1:]), arrays[0].dtype)
        for chosen, array in zip(places, arrays, strict=True):
            rows[chosen] = array
        return rows

    return map_arrays(fill, *parts)


def _from_sources(source_of: np.ndarray, source_rows: Callable[[int, np.ndarray], HostBatch]) -> HostBatch:
    """Makes a batch whose row i is from source `source_of[i]`; `source_rows` makes those of a source where True [B]."""
    sources = [(index, source_of == index) for index in np.unique(source_of).tolist()]
    return _assemble(len(source_of), [source_rows(*source) for source in sources], [chosen for _, chosen in sources])


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
        stop: int | None = None,
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
          stop: nothing is read ahead for batches from this step on; None if the last step is unknown.
        """
        self.sources = list(sources)
        self.global_batch_size = global_batch_size
        self._stop = stop
        self._offset = first_row - first_step * global_batch_size
        shares = row_shares([source.size for source in sources], weights)
        self.sequences_a_row = sum(
            share * source.dataset.size("train") / source.size for share, source in zip(shares, sources, strict=True)
        )
        self.real_share = sum(share * source.real_share for share, source in zip(shares, sources, strict=True))
        self._mixture = make_mixture([source.dataset for source in sources], shares, seed)
        mixed = self._mixture.counts(first_row)
        self._is_sorted = any(source.is_sorted for source in self.sources)
        # Steps of a window of the source that is read fastest; the others need no earlier start.
        self._steps_ahead = min(
            math.ceil(source.window_rows / (share * global_batch_size))
            for source, share in zip(self.sources, shares, strict=True)
        )
        self._row_numbers = Recent(_RECENT_STEPS, self.row_numbers)
        self._read_ahead = ReadAhead(self.prepare)
        self._source_offsets = [first - before for first, before in zip(first_rows or mixed, mixed, strict=True)]

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> HostBatch:
        """Returns rows `rows` of batch `step` in the layout of `TrainRows.rows`.

        A thread then reads what the same rows of a later batch need, a window of the source that is read fastest ahead.
        """
        source_of, numbers = (array[rows] for array in self._row_numbers[step])
        batch = _from_sources(source_of, lambda index, chosen: self.sources[index].rows(numbers[chosen]))
        if step % max(1, self._steps_ahead // _READS_A_WINDOW) == 0:
            self._read_ahead.start(step, rows)
        return batch

    def row_numbers(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each row of batch `step` and its index among the rows of that source: int64 [B]."""
        numbers = self._offset + step * self.global_batch_size + np.arange(self.global_batch_size)
        source_of = np.zeros_like(numbers)
        if len(self.sources) > 1:
            source_of, numbers = self._mixture.locate(numbers)
        numbers += np.asarray(self._source_offsets)[source_of]
        if not self._is_sorted:
            return source_of, numbers
        parts = [source.in_batch_order(numbers[source_of == index]) for index, source in enumerate(self.sources)]
        return np.sort(source_of), np.concatenate(parts)

    def instances(self, step: int, rows: slice | np.ndarray = slice(None)) -> dict[str, np.ndarray]:
        """Returns the instances in rows `rows` [n] of batch `step`: `source`, `instances` and `epoch`.

        `source` int64 [n] is the index in `sources`, `instances` int64 [n, K] those of its training split, -1 for an
        empty slot.
        """
        source_of, numbers = (array[rows] for array in self.row_numbers(step))
        found = np.full((len(numbers), max(source.max_sequences for source in self.sources)), -1, np.int64)
        epochs = np.zeros(len(numbers), np.int64)
        for index in np.unique(source_of).tolist():
            chosen = source_of == index
            inside, epochs[chosen] = self.sources[index].instances(numbers[chosen])
            found[chosen, : inside.shape[1]] = inside
        return {"source": source_of, "instances": found, "epoch": epochs}

    def prepare(self, step: int, rows: slice | np.ndarray) -> None:
        """Reads what rows `rows` need in the batch that is a window after `step`; downloads what later ones need."""
        for ahead, act in ((1, "prepare"), (_FETCHES_AHEAD, "fetch")):
            later = step + ahead * self._steps_ahead
            if self._stop is not None and later >= self._stop:
                return
            source_of, numbers = (array[rows] for array in self._row_numbers[later])
            for index, source in enumerate(self.sources):
                getattr(source, act)(numbers[source_of == index])

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
