"""Batched forward passes."""

from pathlib import Path

import jax
import numpy as np

from bert_jax.batch import Batch
from bert_jax.finetuning.batches import EncodedExamples, load_model
from bert_jax.model import BertForPreTraining
from bert_jax.text.sequences import EncodedSequence
from bert_jax.training.checkpoints import open_checkpoint


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


def test_few_examples_are_few_rows(checkpoint: Path):
    traced: list[int] = []

    def first_words(model: BertForPreTraining, batch: Batch[jax.Array]) -> jax.Array:
        traced.append(len(batch["input_ids"]))
        return model.embeddings.word[...][batch["input_ids"][:, 0]]

    for devices, expected in ((1, [1, 4, 32, 2]), (2, [1, 2, 16])):  # rows of a device
        traced.clear()
        model = load_model(
            open_checkpoint(str(checkpoint)), batch_size=32, max_seq_len=16, devices=jax.devices()[:devices],
            forward=first_words,
        )  # fmt: skip
        for count, batches in ((1, 1), (3, 1), (4, 1), (40, 2), (2, 1)):
            examples = EncodedExamples([EncodedSequence((7 + number % 3,), 1) for number in range(count)], None)
            assert model.predictor.batches(examples) == batches
            outputs = np.stack(model.outputs(examples))
            words = np.asarray(model.parameters["embeddings"]["word"])
            np.testing.assert_array_equal(outputs, words[7 + np.arange(count) % 3])
        assert traced == expected
