"""Random batches of pre-training."""

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch, HostBatch, map_arrays


def make_batch(
    seed: int = 0, *, rows: int = 3, length: int = 16, predictions: int = 4, vocab_size: int = 100,
    sequence_ids: np.ndarray | None = None, counts: np.ndarray | None = None,
) -> HostBatch:  # fmt: skip
    """Returns rows of tokens that are not special, each with a sequence of at least half its length.

    `sequence_ids` [rows, length] replaces these; `counts` [rows] are the predictions of each row, by default random.
    """
    rng = np.random.default_rng(seed)
    if counts is None:
        counts = rng.integers(1, predictions + 1, rows)
    if sequence_ids is None:
        sequence_ids = np.arange(length) < rng.integers(length // 2, length + 1, (rows, 1))
    rows, length = sequence_ids.shape
    real = np.count_nonzero(sequence_ids, axis=1)[:, None]
    return {
        "input_ids": rng.integers(5, vocab_size, (rows, length)).astype(np.int32),
        "token_type_ids": rng.integers(0, 2, (rows, length)).astype(np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "sequence_ids": sequence_ids.astype(np.int32),
        "masked_positions": np.sort(rng.integers(1, real, (rows, predictions))).astype(np.int32),
        "masked_ids": rng.integers(5, vocab_size, (rows, predictions)).astype(np.int32),
        "masked_weights": (np.arange(predictions) < counts[:, None]).astype(np.float32),
        "cls_positions": np.zeros((rows, 1), np.int32),
        "next_sentence_labels": rng.integers(0, 2, (rows, 1)).astype(np.int32),
        "next_sentence_weights": np.ones((rows, 1), np.float32),
    }


def make_device_batch(seed: int = 0, **sizes: object) -> Batch[jax.Array]:
    """Returns `make_batch` on the default device."""
    return map_arrays(jnp.asarray, make_batch(seed, **sizes))
