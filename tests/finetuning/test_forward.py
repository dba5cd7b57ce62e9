"""Batched forward passes."""

from pathlib import Path

import jax
import numpy as np

from bert_jax.batch import Batch
from bert_jax.finetuning.forward import load_model
from bert_jax.finetuning.inputs.batching import EncodedExamples
from bert_jax.model import BertForPreTraining
from bert_jax.text.sequences import EncodedSequence
from bert_jax.training.checkpointing.checkpoints import open_checkpoint


def test_one_program_per_padded_length_and_outputs_in_the_order_of_the_examples(checkpoint: Path):
    traced: list[tuple[int, ...]] = []

    def word_embeddings(model: BertForPreTraining, batch: Batch[jax.Array]) -> jax.Array:
        traced.append(batch["input_ids"].shape)
        return model.embeddings.word[...][batch["input_ids"]]

    model = load_model(
        open_checkpoint(str(checkpoint)), batch_size=2, max_seq_len=40, devices=jax.devices()[:1],
        forward=word_embeddings,
    )  # fmt: skip
    sequences = [EncodedSequence(tuple(range(length)), length) for length in (30, 3, 36, 9, 5)]
    for _ in range(2):
        outputs = model.outputs(EncodedExamples(sequences, None))
    assert traced == [(2, 16), (2, 32), (2, 40)]
    words = np.asarray(model.parameters["embeddings"]["word"])
    for sequence, output in zip(sequences, outputs, strict=True):
        np.testing.assert_array_equal(output, words[list(sequence.input_ids)])
