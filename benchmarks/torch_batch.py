"""Batches of the training step as inputs of `transformers` BertForPreTraining in torch."""

from typing import Any

import numpy as np

from bert_jax.batch import HostBatch

IGNORED = -100
"""Label of a token that is not predicted."""


def torch_inputs(batch: HostBatch, device: str) -> dict[str, Any]:
    """Returns tensors int64 [B, L], with labels for all tokens, and `next_sentence_label` [B]."""
    import torch

    labels = np.full(batch["input_ids"].shape, IGNORED, np.int64)
    row, slot = np.nonzero(batch["masked_weights"])
    labels[row, batch["masked_positions"][row, slot]] = batch["masked_ids"][row, slot]
    arrays = {
        "input_ids": batch["input_ids"], "token_type_ids": batch["token_type_ids"],
        "attention_mask": batch["sequence_ids"], "labels": labels,
        "next_sentence_label": batch["next_sentence_labels"][:, 0],
    }  # fmt: skip
    return {name: torch.as_tensor(array, dtype=torch.long, device=device) for name, array in arrays.items()}
