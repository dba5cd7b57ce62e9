"""Batches of a prepared dataset, each a pure function of (dataset, seed, step).

Nothing is remembered from one batch to the next, so a run resumes from one integer, and any process can make any
rows of any batch.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import numpy as np

from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.hashing import key_from, permute
from bert_jax.data.masking import Masking, mask_batch, mask_keys, prediction_counts
from bert_jax.errors import InputError

Batch = dict[str, np.ndarray]
T = TypeVar("T")


def _make_batch(
    dataset: PreparedDataset, instances: Batch, masking: Masking | None, mask_key: int, rounds: np.ndarray
) -> Batch:
    """The batch layout of the model: an unpacked row is a pack of one sequence (K = 1)."""
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
            continuation=tokenizer.continuation,
        )
    return {
        "token_type_ids": instances["token_type_ids"],
        "positions": instances["positions"],
        "sequence_ids": sequence_ids,
        **targets,  # input_ids, masked_positions, masked_ids, masked_weights
        "cls_positions": np.zeros((len(input_ids), 1), np.int32),
        "next_sentence_labels": instances["is_random_next"][:, None].astype(np.int32),
        "next_sentence_weights": (sequence_ids[:, :1] > 0).astype(np.float32),
    }


def next_token_targets(input_ids: np.ndarray, sequence_ids: np.ndarray) -> Batch:
    """What a left-to-right model predicts: at each position the next token of its sequence. Nothing is masked.

    `input_ids`, `sequence_ids` [B, L] give the `input_ids`, `masked_positions`, `masked_ids` and `masked_weights` of a
    batch with P = L. The last token of a sequence and the padding have weight 0.
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


class TrainLoader:
    """The training split in a new order every epoch, with new masks every epoch or those of `static_masks` epochs.

    Example i of the run (batch i // B, row i % B) is position i % N of epoch i // N: an epoch ends where it ends,
    in the middle of a batch if need be, and every instance is seen once in each.
    """

    def __init__(
        self,
        dataset: PreparedDataset,
        *,
        seed: int,
        global_batch_size: int,
        masking: Masking | None,
        static_masks: int = 0,
        first_step: int = 0,
        first_example: int = 0,
    ):
        """Raises InputError where the training split is empty.

        Args:
          dataset: what to read.
          seed: of order and masks.
          global_batch_size: B.
          masking: how masks are drawn; None for left-to-right batches, see `next_token_targets`.
          static_masks: 0 draws new masks in every epoch, k goes round the masks of k epochs, as a dataset masked
            beforehand k times over would.
          first_step: the batch that begins with example `first_example`.
          first_example: where in the endless row of examples.
        """
        self.dataset = dataset
        self.size = dataset.size("train")
        if not self.size:
            raise InputError(f"{dataset.folder} has no training instances: prepare it from more text")
        self.global_batch_size = global_batch_size
        self.masking = masking
        self.static_masks = static_masks
        self._offset = first_example - first_step * global_batch_size
        self._order_key = key_from(dataset.info.hash, seed, "order")
        self._mask_key = key_from(dataset.info.hash, seed, "mask")

    def examples(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the instances of batch `step` and the epoch of each, int64 [B]."""
        position = self._offset + step * self.global_batch_size + np.arange(self.global_batch_size)
        epochs, within = np.divmod(position, self.size)
        indices = np.empty_like(position)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = permute(within[chosen], self.size, key_from(self._order_key, epoch))
        return indices, epochs

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Rows `rows` of batch `step`, as the model reads them.

        `input_ids, token_type_ids, positions, sequence_ids` int32 [B, L]; `masked_positions, masked_ids` int32 and
        `masked_weights` float32 [B, P]; `cls_positions, next_sentence_labels` int32 and `next_sentence_weights`
        float32 [B, K].
        """
        indices, epochs = (array[rows] for array in self.examples(step))
        instances = self.dataset.instances("train", indices)
        rounds = epochs % self.static_masks if self.static_masks else epochs
        return _make_batch(self.dataset, instances, self.masking, self._mask_key, rounds)


class EvalLoader:
    """The eval split in its stored order, under masks that never change.

    A mask depends on the dataset's seed and the instance alone and is always 80/10/10 of all 15%, so that runs which
    train differently are evaluated alike.
    """

    def __init__(self, dataset: PreparedDataset, *, batch_size: int, batches: int = -1, left_to_right: bool = False):
        """`batches` of `batch_size` rows, -1 for the whole split; there are fewer where the split is smaller.

        `left_to_right` batches are not masked; see `next_token_targets`.
        """
        self.dataset = dataset
        self.batch_size = batch_size
        self.masking = None if left_to_right else Masking(int(prediction_counts(dataset.info.seq_len)))
        whole = -(-dataset.size("eval") // batch_size)
        self.batches = whole if batches < 0 else min(batches, whole)
        self._mask_key = key_from(dataset.info.seed, "eval mask")

    def batch(self, number: int, rows: slice = slice(None)) -> Batch:
        """Rows of eval batch `number`, laid out as `TrainLoader.batch`; past the split's end rows weigh nothing."""
        size = self.dataset.size("eval")
        position = (number * self.batch_size + np.arange(self.batch_size))[rows]
        real = position < size
        instances = self.dataset.instances("eval", np.minimum(position, size - 1))
        batch = _make_batch(self.dataset, instances, self.masking, self._mask_key, np.zeros(len(position), np.int64))
        for weights in ("masked_weights", "next_sentence_weights"):
            batch[weights] = batch[weights] * real[:, None].astype(np.float32)
        return batch

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(number) for number in range(self.batches))


class Prefetch(Generic[T]):
    """Makes `make(step)` for step in [start, stop) in a background thread, `depth` ahead of its reader.

    What goes wrong in the thread is raised where the item would have come. Close it when leaving early.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int, depth: int = 3):
        self._items: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._remaining = max(0, stop - start)
        self._thread = threading.Thread(target=self._run, args=(make, start, stop), name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[int], T], start: int, stop: int) -> None:
        for step in range(start, stop):
            try:
                item: tuple[T | None, BaseException | None] = (make(step), None)
            except BaseException as error:
                item = (None, error)
            while not self._closed.is_set():
                try:
                    self._items.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if self._closed.is_set() or item[1] is not None:
                return

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._remaining:
            raise StopIteration
        item, error = self._items.get()
        if error is not None:
            self._remaining = 0
            raise error
        self._remaining -= 1
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """Stops the thread and waits for it."""
        self._remaining = 0  # nothing comes any more: a reader that goes on stops, and does not wait for ever
        self._closed.set()
        self._thread.join()
