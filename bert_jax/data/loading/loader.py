"""Batches of a prepared dataset, each a pure function of (dataset, seed, step).

The loaders are stateless: a run resumes from one integer, and any process can compute any rows of any batch.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from bert_jax.batch import HostBatch, map_arrays
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.hashing import key_from, permute
from bert_jax.data.loading.masking import Masking, mask_batch, mask_keys
from bert_jax.data.loading.packing import most_predictions, pack, pack_batch, pack_lengths
from bert_jax.errors import InputError
from bert_jax.progress import available_cores

PACKED_TOGETHER = 1 << 14
"""Instances that are packed together, and whose rows are shuffled together: a random sample of the dataset."""
_CHUNKS_KEPT = 8
_CORES_A_THREAD = 4  # NumPy releases the interpreter's lock for most of the time, but not for all of it
_MOST_THREADS = 4
_AHEAD = 3  # finished items that wait, beside those that the threads compute
T = TypeVar("T")
_PERIOD = 4096  # rows in which the count of each source is exact to one row
_ONE = 1 << 32  # fixed-point representation of the share 1


def _make_batch(
    dataset: PreparedDataset, instances: dict[str, np.ndarray], masking: Masking | None, mask_key: int,
    rounds: np.ndarray | int,
) -> HostBatch:  # fmt: skip
    """Returns the batch layout of the model; an unpacked row is a pack of one sequence (K = 1)."""
    input_ids, sequence_ids, tokenizer = instances["input_ids"], instances["sequence_ids"], dataset.tokenizer
    if masking is None:
        targets = next_token_targets(input_ids, sequence_ids)
    else:
        targets = mask_batch(
            input_ids,
            instances["maskable"],
            sequence_ids.sum(axis=1),
            mask_keys(instances["instance_ids"], mask_key, rounds),
            masking,
            mask_id=tokenizer.mask_id,
            vocab_size=tokenizer.vocab_size,
            continues_word=tokenizer.continues_word(input_ids) if masking.whole_word else None,
        )
    return {
        **targets,
        "token_type_ids": instances["token_type_ids"],
        "positions": instances["positions"],
        "sequence_ids": sequence_ids,
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
        raise InputError(f"data.max_predictions={masking.max_predictions}: a sequence has {seq_len} tokens; use -1")
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
      max_sequences: K, the maximum number of sequences in a row.
      predictions: P, the maximum number of predictions in a row.
      real_share: mean share of tokens in a row that are not padding.
    """

    def __init__(
        self, dataset: PreparedDataset, *, seed: int, masking: Masking | None, static_masks: int = 0,
        max_sequences: int = 1,
    ):  # fmt: skip
        """Raises InputError if the training split is empty.

        Args:
          dataset: the prepared dataset.
          seed: of order and masks.
          masking: the masking rule; None for left-to-right rows, see `next_token_targets`.
          static_masks: 0 for new masks in every epoch; k repeats the masks of k epochs, as in a dataset that was masked
            k times in advance.
          max_sequences: K, the maximum number of instances in a row.
        """
        instances = dataset.size("train")
        if not instances:
            raise InputError(f"{dataset.folder} has no training instances; prepare more text")
        self.dataset, self.max_sequences = dataset, max_sequences
        self._masking, self._static_masks, self._seq_len = masking, static_masks, dataset.info.seq_len
        self._keys = {name: key_from(dataset.info.hash, seed, name) for name in ("order", "mask", "pack")}
        self.predictions = predictions_per_row(masking, self._seq_len, max_sequences)
        lengths = dataset.lengths("train")
        if max_sequences > 1:
            self._chunks = [lengths[at : at + PACKED_TOGETHER] for at in range(0, instances, PACKED_TOGETHER)]
            self._chunk_rows = np.array(
                [sum(count for count, _ in pack_lengths(chunk, self._seq_len, max_sequences)) for chunk in self._chunks]
            )
            self._chunk_order = functools.lru_cache(_CHUNKS_KEPT)(self._order_of_chunks)
            self._packed = functools.lru_cache(_CHUNKS_KEPT)(self._pack_chunk)
        self.size = instances if max_sequences == 1 else int(self._chunk_rows.sum())
        self.real_share = float(lengths.sum(dtype=np.int64)) / (self.size * self._seq_len)

    def rows(self, numbers: np.ndarray) -> HostBatch:
        """Returns the rows `numbers` int64 [n]: the inputs of the model and the targets of pre-training."""
        found, epochs = self.instances(numbers)
        is_used = found >= 0
        rounds = (epochs % self._static_masks if self._static_masks else epochs)[np.nonzero(is_used)[0]]
        unmasked = self.dataset.instances("train", found[is_used])
        sequences = _make_batch(self.dataset, unmasked, self._masking, self._keys["mask"], rounds)
        if self.max_sequences == 1:
            return sequences
        return pack_batch(sequences, is_used, self._seq_len, self.predictions, self.dataset.tokenizer.pad_id)

    def instances(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the instances in rows `numbers` [n], int64 [n, K] with -1 for empty slots, and the epochs [n]."""
        epochs, places = np.divmod(numbers, self.size)
        found = np.empty((len(numbers), self.max_sequences), np.int64)
        locate = self._shuffled if self.max_sequences == 1 else self._packs
        for epoch in np.unique(epochs).tolist():
            found[epochs == epoch] = locate(epoch, places[epochs == epoch])
        return found, epochs

    def _shuffled(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Returns the instances [n, 1] at places [n] of an epoch."""
        return permute(places, self.size, key_from(self._keys["order"], epoch))[:, None]

    def _packs(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Returns the instances [n, K] of the packed rows at places [n] of an epoch."""
        order, ends = self._chunk_order(epoch)
        positions = np.searchsorted(ends, places, side="right")
        found = np.empty((len(places), self.max_sequences), np.int64)
        for position in np.unique(positions).tolist():
            chunk, chosen = int(order[position]), positions == position
            inside = places[chosen] - (ends[position] - self._chunk_rows[chunk])
            found[chosen] = self._packed(epoch, chunk)[inside]
        return found

    def _order_of_chunks(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the chunks in the order of an epoch, and the row after the last one of each, both int64 [chunks]."""
        chunks = np.arange(len(self._chunks))
        order = permute(chunks, len(chunks), key_from(self._keys["order"], epoch))
        return order, np.cumsum(self._chunk_rows[order])

    def _pack_chunk(self, epoch: int, chunk: int) -> np.ndarray:
        """Returns the instances of the rows of a chunk in an epoch, shuffled: int64 [rows, K], -1 for an empty slot."""
        key = key_from(self._keys["pack"], epoch, chunk)
        rows = pack(self._chunks[chunk], self._seq_len, self.max_sequences, key)
        rows[rows >= 0] += chunk * PACKED_TOGETHER
        return rows[permute(np.arange(len(rows)), len(rows), key)]


def row_shares(sizes: Sequence[int], weights: Sequence[float] = ()) -> list[float]:
    """Returns each source's share of the rows, proportional to `weights`, by default to `sizes` (rows an epoch)."""
    shares = np.asarray(weights or sizes, np.float64)
    shares /= shares.max()
    return (shares / shares.sum()).tolist()


class Mixture:
    """Assigns each row of an endless sequence to a source: a pure function of (weights, key, row)."""

    def __init__(self, weights: Sequence[float], key: int):
        """`weights` are relative to their sum; `key` is the random key of the order."""
        shares = np.cumsum(np.asarray(weights, np.float64)) / np.sum(weights)
        self._bounds = [0, *(round(share * _ONE) for share in shares[:-1].tolist()), _ONE]
        self._shares = np.diff(self._bounds).tolist()
        # The bounds are rounded: between two of them, the count of less than a row in a period would decrease.
        self._has_rare_source = any(_PERIOD * share < _ONE for share in self._shares[1:-1])
        self._key = key

    def _period_counts(self, period: int) -> list[int]:
        """Returns the number of rows of each source before a period."""
        if not self._has_rare_source:
            return np.diff([period * _PERIOD * bound // _ONE for bound in self._bounds]).tolist()
        counts = [period * _PERIOD * share // _ONE for share in self._shares]
        counts[self._shares.index(max(self._shares))] += period * _PERIOD - sum(counts)
        return counts

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each row int64 [n] and its index among that source's rows, both int64 [n]."""
        sources, numbers = np.empty_like(rows), np.empty_like(rows)
        periods = rows // _PERIOD
        for period in np.unique(periods).tolist():
            before = np.array(self._period_counts(period))
            inside = np.array(self._period_counts(period + 1)) - before
            shuffled = permute(np.arange(_PERIOD), _PERIOD, key_from(self._key, period))
            source_of = np.repeat(np.arange(len(inside)), inside)[shuffled]
            number_of = np.empty(_PERIOD, np.int64)
            for source, count in enumerate(inside.tolist()):
                number_of[source_of == source] = before[source] + np.arange(count)
            chosen = periods == period
            places = rows[chosen] - period * _PERIOD
            sources[chosen], numbers[chosen] = source_of[places], number_of[places]
        return sources, numbers

    def counts(self, rows: int) -> list[int]:
        """Returns the number of rows of each source among the first `rows` rows."""
        period = rows // _PERIOD
        counts = np.array(self._period_counts(period))
        sources, _ = self.locate(np.arange(period * _PERIOD, rows))
        return (counts + np.bincount(sources, minlength=len(counts))).tolist()


class TrainLoader:
    """Training batches of B rows, from one dataset or a mixture of several.

    `batch(step)` is a pure function of the constructor's arguments and the step.

    Attributes:
      sequences_a_row: mean number of sequences in a row.
      real_share: mean share of tokens in a row that are not padding.
    """

    def __init__(
        self, sources: Sequence[TrainRows], *, seed: int, global_batch_size: int, weights: Sequence[float] = (),
        first_step: int = 0, first_row: int = 0, first_rows: Sequence[int] = (),
        skipped: Sequence[tuple[int, int]] = (),
    ):  # fmt: skip
        """Creates the loader; it may start in the middle of a run.

        Args:
          sources: one or more sources of equal sequence length.
          seed: of the mixture.
          global_batch_size: B.
          weights: relative shares of the sources in the rows, above 0; by default proportional to their sizes.
          first_step: the step of the batch that begins with row `first_row`.
          first_row: global index of that batch's first row in the mixture.
          first_rows: index of each source's first row; by default the number of its rows before `first_row`.
          skipped: (first, last) steps from 1, as in `data.skip_steps`; all after `first_step`.
        """
        self._skipped = skipped
        self.sources, self.global_batch_size = list(sources), global_batch_size
        self._offset = first_row - first_step * global_batch_size
        shares = row_shares([source.size for source in sources], weights)
        self.sequences_a_row = sum(
            share * source.dataset.size("train") / source.size for share, source in zip(shares, sources, strict=True)
        )
        self.real_share = sum(share * source.real_share for share, source in zip(shares, sources, strict=True))
        self._mixture = Mixture(shares, key_from(seed, "mixture", *(source.dataset.info.hash for source in sources)))
        mixed = self._mixture.counts(first_row)
        self._source_offsets = [first - before for first, before in zip(first_rows or mixed, mixed, strict=True)]

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> HostBatch:
        """Returns rows `rows` of batch `step` in the layout of `TrainRows.rows`."""
        source_of, numbers = self.row_numbers(step, rows)
        present: list[int] = np.unique(source_of).tolist()
        batches = [self.sources[index].rows(numbers[source_of == index]) for index in present]
        if len(batches) == 1:
            return batches[0]
        places = np.argsort(np.argsort(source_of, kind="stable"))  # of the rows in the batches together
        return map_arrays(lambda *arrays: np.concatenate(arrays).take(places, axis=0), *batches)

    def row_numbers(self, step: int, rows: slice | np.ndarray = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of rows `rows` [n] of batch `step`, and the index of each among that source's: int64 [n].

        `rows` index the B rows of the batch.
        """
        numbers = (self.row_after(step + 1) - self.global_batch_size + np.arange(self.global_batch_size))[rows]
        source_of = np.zeros_like(numbers)
        if len(self.sources) > 1:
            source_of, numbers = self._mixture.locate(numbers)
        return source_of, numbers + np.asarray(self._source_offsets)[source_of]

    def row_after(self, steps: int) -> int:
        """Returns the index in the mixture of the row that follows those of the first `steps` batches."""
        skipped = sum(last - first + 1 for first, last in self._skipped if first <= steps)
        return self._offset + (steps + skipped) * self.global_batch_size

    def next_rows(self, step: int) -> list[int]:
        """Returns the index of each source's first row that follows those of the first `step` batches."""
        mixed = self._mixture.counts(self.row_after(step))
        return [count + offset for count, offset in zip(mixed, self._source_offsets, strict=True)]

    def epochs(self, step: int) -> list[float]:
        """Returns the number of epochs of each source before batch `step`, with those of skipped batches."""
        return [row / source.size for row, source in zip(self.next_rows(step), self.sources, strict=True)]


class EvalLoader:
    """Evaluation batches of one or more datasets, with a fixed order and fixed masks.

    Instances keep their stored order. A batch is of one dataset, `source(number)`, so that each has a loss of its own;
    those of several are interleaved evenly, with the same rows for any number of microbatches. A mask depends only on
    the dataset's seed and the instance. Masks are always 80/10/10 of 15%, so that evaluations of different runs are
    comparable.
    """

    def __init__(
        self, datasets: Sequence[PreparedDataset], *, batch_size: int, microbatches: int = 1, batches: int = -1,
        left_to_right: bool = False,
    ):  # fmt: skip
        """Creates microbatches of `batch_size` rows: `microbatches` for each of at most `batches` batches, -1 for all.

        `left_to_right` batches are not masked; see `next_token_targets`.
        """
        self.datasets = list(datasets)
        self.batch_size = batch_size
        self.masking = None if left_to_right else Masking()
        sizes = np.array([dataset.size("eval") for dataset in datasets])
        counts = -(-sizes // (batch_size * microbatches))
        order = np.argsort(np.concatenate([np.arange(count) / count for count in counts]), kind="stable")
        order = np.repeat(order[: None if batches < 0 else batches], microbatches)
        source = np.repeat(np.arange(len(counts)), counts)[order]
        number = np.concatenate([np.arange(count) for count in counts])[order] * microbatches
        number += np.arange(len(number)) % microbatches
        has_rows = number * batch_size < sizes[source]
        self._source, self._number, self.batches = source[has_rows], number[has_rows], int(has_rows.sum())

    def source(self, number: int) -> int:
        """Returns the index of the dataset of eval batch `number`."""
        return int(self._source[number])

    def real_rows(self, number: int) -> int:
        """Returns the number of rows of eval batch `number` before the split's end."""
        left = self.datasets[self.source(number)].size("eval") - int(self._number[number]) * self.batch_size
        return min(left, self.batch_size)

    def batch(self, number: int, rows: slice | np.ndarray = slice(None)) -> HostBatch:
        """Returns rows of eval batch `number` as `TrainRows.rows` does; rows after the split's end have weight 0."""
        dataset, size = self.datasets[self.source(number)], self.real_rows(number)
        positions = np.arange(self.batch_size)[rows]
        real = positions < size
        first = int(self._number[number]) * self.batch_size
        instances = dataset.instances("eval", first + np.minimum(positions, size - 1))
        batch = _make_batch(dataset, instances, self.masking, key_from(dataset.info.seed, "eval mask"), 0)
        batch["masked_weights"] *= real[:, None]
        batch["next_sentence_weights"] *= real[:, None]
        return batch

    def __iter__(self) -> Iterator[HostBatch]:
        return (self.batch(number) for number in range(self.batches))


class Prefetch(Generic[T]):
    """Iterator over `make(step)` for step in [start, stop), computed in background threads by Grain, in order.

    An exception in a thread is raised by `next` in place of the item. Call `close` when stopping early. `waited` is the
    time in seconds that the consumer has waited for items.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int):
        import grain

        threads = min(max(available_cores() // _CORES_A_THREAD, 1), _MOST_THREADS)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads + _AHEAD)
        steps = grain.MapDataset.range(start, max(start, stop))
        self._items: Any = iter(steps.map(make).to_iter_dataset(options))
        self.waited = 0.0

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        began = time.perf_counter()
        item: T = next(self._items)
        self.waited += time.perf_counter() - began
        return item

    def close(self) -> None:
        """Stops the threads, each after the item that it computes."""
        self._items.close()
