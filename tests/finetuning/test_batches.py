"""Rows of a task, and batches of them."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.batch import Batch
from bert_jax.errors import BertJaxError, InputError
from bert_jax.finetuning.batches import EncodedExamples, epoch_of_batches, load_model
from bert_jax.finetuning.task import BadRows, read_rows, row_id
from bert_jax.model import BertForPreTraining
from bert_jax.text.sequences import LENGTHS, EncodedSequence, choose_lengths, padded_length
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpoints import open_checkpoint


def make_rows(count: int, group: int = 1) -> EncodedExamples:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 90, count * group)
    sequences = [EncodedSequence(tuple(range(10, 10 + length)), int(length) // 2) for length in lengths]
    return EncodedExamples(sequences, np.arange(count * group, dtype=np.int32), group)


def test_rows_are_laid_out_and_filled_up(tokenizer: Tokenizer):
    rows = EncodedExamples([EncodedSequence((5, 6, 7), 2), EncodedSequence((8, 9), 2)], np.array([3, 4], np.int32))
    batch = rows.batch(np.array([1, 0]), 4, 3, tokenizer)
    pad = tokenizer.pad_id
    np.testing.assert_array_equal(batch["input_ids"], [[8, 9, pad, pad], [5, 6, 7, pad], [pad] * 4])
    np.testing.assert_array_equal(batch["token_type_ids"], [[0] * 4, [0, 0, 1, 0], [0] * 4])
    np.testing.assert_array_equal(batch["sequence_ids"], [[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]])
    np.testing.assert_array_equal(batch["positions"], [[0, 1, 2, 3]] * 3)
    np.testing.assert_array_equal(batch["cls_positions"], [[0]] * 3)
    np.testing.assert_array_equal(batch["weights"], [1, 1, 0])
    np.testing.assert_array_equal(batch["labels"], [4, 3, 0])


def test_a_left_to_right_model_pools_the_last_token(tokenizer: Tokenizer):
    rows = EncodedExamples([EncodedSequence((5, 6, 7), 2), EncodedSequence((8, 9), 2)], None)
    batch = rows.batch(np.array([0, 1]), 4, 2, tokenizer, last_position=True)
    np.testing.assert_array_equal(batch["cls_positions"], [[2], [1]])
    assert "labels" not in batch


def test_labels_of_tokens_are_padded_with_none(tokenizer: Tokenizer):
    rows = EncodedExamples(
        [EncodedSequence((5, 6, 7), 3), EncodedSequence((8, 9), 2)], [np.array([-1, 2, -1]), np.array([-1, 0])]
    )
    batch = rows.batch(np.array([0, 1]), 4, 3, tokenizer)
    np.testing.assert_array_equal(batch["labels"], [[-1, 2, -1, -1], [-1, 0, -1, -1], [-1] * 4])


def test_the_rows_of_an_example_stay_together(tokenizer: Tokenizer):
    rows = make_rows(5, group=4)
    assert len(rows) == 5
    batch = rows.batch(np.array([3, 1]), 96, 3, tokenizer)
    np.testing.assert_array_equal(batch["labels"], [12, 13, 14, 15, 4, 5, 6, 7, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch["weights"], [1] * 8 + [0] * 4)
    np.testing.assert_array_equal(
        rows.lengths(),
        [max(len(sequence.input_ids) for sequence in rows.sequences[i : i + 4]) for i in range(0, 20, 4)],
    )


def test_epoch_has_each_example_once_and_is_reproducible():
    rows = make_rows(2_005)
    batches = epoch_of_batches(rows, 10, seed=1, epoch=2, window=8)
    assert [len(batch) for batch in batches] == [10] * 200 + [5]
    assert sorted(np.concatenate(batches).tolist()) == list(range(2_005))
    same = epoch_of_batches(rows, 10, seed=1, epoch=2, window=8)
    assert all((a == b).all() for a, b in zip(batches, same, strict=True))
    for seed, epoch, window in ((1, 3, 8), (2, 2, 8), (1, 2, 4)):
        other = epoch_of_batches(rows, 10, seed, epoch, window=window)
        assert np.concatenate(other).tolist() != np.concatenate(batches).tolist()


@pytest.mark.parametrize(("window", "spread"), [(8, 20), (64, 5)])
def test_batches_of_a_window_follow_one_another_and_share_no_length(window: int, spread: int):
    rows = make_rows(2_000)
    lengths = rows.lengths()
    batches = epoch_of_batches(rows, 10, seed=1, epoch=2, window=window)
    assert np.mean([np.ptp(lengths[batch]) for batch in batches]) < spread
    firsts = [int(lengths[batch].min()) for batch in batches]
    assert np.mean(np.abs(np.diff(firsts))) > 15  # short and long batches take turns
    for start in range(0, len(batches), window):
        by_length = sorted(batches[start : start + window], key=lambda batch: tuple(np.sort(lengths[batch])))
        for short, long in itertools.pairwise(by_length):
            assert lengths[short].max() <= lengths[long].min()
        if len(by_length) == window:  # a random sample of all examples
            assert abs(np.mean(np.concatenate(by_length)) - 1_000) < 300


def test_a_window_of_one_batch_sorts_nothing():
    rows = make_rows(400)
    batches = epoch_of_batches(rows, 10, seed=1, epoch=2, window=1)
    assert np.mean([np.ptp(rows.lengths()[batch]) for batch in batches]) > 60


@pytest.mark.parametrize(
    ("length", "limit", "padded"),
    [(1, 128, 16), (16, 128, 16), (17, 128, 32), (120, 128, 128), (120, 122, 122), (513, 2_000, 1_024), (9, 8, 8)],
)
def test_lengths_are_few(length: int, limit: int, padded: int):
    assert padded_length(length, limit) == padded
    assert len({padded_length(length, 512) for length in range(1, 513)}) == len(LENGTHS)


def padded_work(batches: list[int], lengths: tuple[int, ...], program: float) -> float:
    """The work of batches padded to `lengths`, a token each, and of their programs."""
    padded = [padded_length(length, 512, lengths) for length in batches]
    return sum(padded) + program * len(set(padded))


@pytest.mark.parametrize("program", [0.0, 300.0, 1_000.0, 1e9])
def test_chosen_lengths_take_the_least_work(program: float):
    batches = [20, 30, 40, 60, 61, 90, 100, 101, 70, 33] * 10
    chosen = choose_lengths(batches, 512, float, program)
    candidates = (24, 32, 40, 64, 72, 96, 104)
    every = [lengths for count in range(7) for lengths in itertools.combinations(candidates[:-1], count)]
    assert padded_work(batches, chosen, program) == min(
        padded_work(batches, (*lengths, candidates[-1]), program) for lengths in every
    )
    assert chosen[-1] == 104  # the smallest multiple of 8 that holds 101 tokens
    assert len(chosen) == {0.0: 7, 300.0: 3, 1_000.0: 2, 1e9: 1}[program]


def test_chosen_lengths_are_at_most_the_maximum():
    assert choose_lengths([3, 17], 20, float, 1e9) == (20,)
    assert choose_lengths([700, 30, 130, 260], 1_000, float, 0.0) == (32, 144, 288, 768)
    assert [padded_length(length, 1_000, (32, 768)) for length in (3, 33, 700, 800)] == [32, 768, 768, 1_000]


# --- Rows of files -----------------------------------------------------------------------------------------------


def test_bad_rows_are_counted_by_reason_and_logged_with_their_place(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "a.csv"
    path.write_bytes(b"text,label\na,1\nb\n" + b"c\n" * 9 + b'"two\nlines",2\n')
    bad_rows = BadRows()

    def example(row: dict, number: int) -> tuple[int, str]:
        return number, row["text"]

    assert read_rows(str(path), bad_rows, example, "a text") == [(1, "a"), (12, "two\nlines")]
    assert bad_rows.counts == {str(path): 10}
    assert [line.split(": ")[1] for line in caplog.messages[:-1]] == [f"{path}:{line}" for line in range(3, 8)]
    assert "10" in caplog.messages[-1]
    with pytest.raises(InputError, match=rf"{path}:3: .*\b2\b.*\b1\b"):
        read_rows(str(path), BadRows(strict=True), example, "a text")


@pytest.mark.parametrize(
    ("row", "identity"),
    [({"text": "a", "guid": "g7"}, "g7"), ({"index": "0", "id": "q"}, "q"), ({"idx": 5}, "5"),
     ({"index": "1", "id": ""}, "1"), ({"text": "a"}, "3"), ({"": "7", "text": "a"}, "7")],
)  # fmt: skip
def test_ids_are_those_of_the_row_or_its_number(row: dict, identity: str):
    assert row_id(row, 3) == identity


# --- Forward passes ----------------------------------------------------------------------------------------------


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


def test_outputs_that_are_not_finite_are_an_error(checkpoint: Path):
    """Their largest would be class 0."""

    def diverged(model: BertForPreTraining, batch: Batch[jax.Array]) -> jax.Array:
        return jnp.where(batch["input_ids"][:, :1] == 7, jnp.nan, model.embeddings.word[...][batch["input_ids"][:, 0]])

    model = load_model(open_checkpoint(str(checkpoint)), batch_size=2, max_seq_len=16, forward=diverged)
    assert np.isfinite(model.outputs(EncodedExamples([EncodedSequence((8,), 1)], None))).all()
    with pytest.raises(BertJaxError, match="not finite"):
        model.outputs(EncodedExamples([EncodedSequence((number,), 1) for number in (8, 7)], None))
