"""Packing: keeps all sequences, needs little padding, and does not change a sequence's loss."""

import functools
from collections import Counter

import jax
import numpy as np
import pytest
from flax import nnx
from support.models import assert_close, initialize

from bert_jax.data.loading.loader import TrainRows
from bert_jax.data.loading.masking import Masking
from bert_jax.data.loading.packing import most_predictions, pack, pack_lengths
from bert_jax.model import BertConfig
from bert_jax.training import objectives


def lengths_like_wikipedia(count):
    """Lengths of a corpus with documents of some 500 tokens at 512: half are full, half of any length."""
    rng = np.random.default_rng(0)
    return np.where(rng.random(count) < 0.5, 512, rng.integers(5, 513, count))


@pytest.mark.parametrize("most", [1, 2, 8])
@pytest.mark.parametrize("count", [1, 7, 8192])
def test_every_sequence_is_in_one_row(most, count):
    lengths = lengths_like_wikipedia(count)
    rows = pack(lengths, 512, most, key=3)
    assert sorted(rows[rows >= 0].tolist()) == list(range(count))
    assert rows.shape[1] == most
    held = np.where(rows >= 0, lengths[rows], 0).sum(axis=1)
    assert held.max() <= 512
    assert (rows[:, 0] >= 0).all()
    again = Counter(tuple(sorted(lengths[row[row >= 0]].tolist())) for row in pack(lengths, 512, most, key=4))
    assert again == Counter(tuple(sorted(lengths[row[row >= 0]].tolist())) for row in rows)
    assert sum(number for number, _ in pack_lengths(lengths, 512, most)) == len(rows)


def test_the_key_decides_who_goes_where():
    lengths = np.random.default_rng(0).integers(100, 110, 2000)
    one, same, other = (pack(lengths, 512, 8, key) for key in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one[:, 0] != other[:, 0]).mean() > 0.9


@pytest.mark.parametrize(("seq_len", "most"), [(32, 1), (32, 3), (20, 20), (24, 5)])
def test_most_predictions_is_what_brute_force_finds(seq_len, most):
    def each(lengths):
        return np.minimum(9, np.maximum(1, np.rint(lengths * 0.15).astype(np.int64)))

    best = {0: 0}  # predictions, by the tokens of up to `most` sequences
    for _ in range(most):
        longer = dict(best)
        for used, found in best.items():
            for length in range(1, seq_len - used + 1):
                longer[used + length] = max(longer.get(used + length, 0), found + int(each(np.array([length]))[0]))
        best = longer
    assert most_predictions(each, seq_len, most) == max(best.values())


# --- Batches ----------------------------------------------------------------------------------------------------


def rows_of(dataset, *, most, left_to_right=False, **masking):
    return TrainRows(dataset, seed=0, masking=None if left_to_right else Masking(10, **masking), max_sequences=most)


def sequences_in(batch):
    """Returns (ids, types, positions, predictions, label) of every sequence of a masked batch."""
    found = []
    for row in range(len(batch["input_ids"])):
        for number in range(1, int(batch["sequence_ids"][row].max()) + 1):
            columns = np.nonzero(batch["sequence_ids"][row] == number)[0]
            start = columns[0]
            assert columns.tolist() == list(range(start, start + len(columns)))
            slot = number - 1
            assert batch["cls_positions"][row, slot] == start
            predictions = [
                (int(position - start), int(token))
                for position, token, weight in zip(
                    batch["masked_positions"][row], batch["masked_ids"][row], batch["masked_weights"][row], strict=True
                )
                if weight and start <= position < start + len(columns)
            ]
            found.append(
                (
                    tuple(batch["input_ids"][row, columns].tolist()),
                    tuple(batch["token_type_ids"][row, columns].tolist()),
                    tuple(batch["positions"][row, columns].tolist()),
                    tuple(predictions),
                    int(batch["next_sentence_labels"][row, slot]),
                    float(batch["next_sentence_weights"][row, slot]),
                )
            )
    return found


@pytest.mark.parametrize("left_to_right", [False, True])
def test_an_epoch_packed_is_the_epoch_unpacked(dataset, left_to_right):
    plain, packed = (rows_of(dataset, most=most, left_to_right=left_to_right) for most in (1, 6))
    assert packed.size < 0.8 * plain.size
    assert packed.real_share > plain.real_share
    for epoch in range(2):
        batches = [rows.rows(epoch * rows.size + np.arange(rows.size)) for rows in (plain, packed)]
        one, other = (Counter(sequences_in(batch)) for batch in batches)
        assert one == other  # tokens, positions, masks and labels of every sequence
        batch = batches[1]
        padding = batch["sequence_ids"] == 0
        assert (batch["input_ids"][padding] == dataset.tokenizer.pad_id).all()
        assert 1 - padding.mean() == pytest.approx(packed.real_share)
        assert batch["masked_positions"].shape[1] == packed.predictions
        assert batch["masked_weights"].sum() == batches[0]["masked_weights"].sum()
        held = batch["next_sentence_weights"].sum(axis=1)
        assert held.max() <= 6
        assert held.sum() == plain.size


@pytest.mark.parametrize("is_decoder", [False, pytest.param(True, marks=pytest.mark.long)])
def test_losses_and_gradients_are_those_of_the_sequences_alone(dataset, is_decoder):
    config = BertConfig(
        vocab_size=dataset.tokenizer.vocab_size, hidden_size=48, num_hidden_layers=1, num_attention_heads=3,
        intermediate_size=96, max_position_embeddings=64, initializer_range=0.1, is_decoder=is_decoder,
    )  # fmt: skip
    graph, parameters = initialize(config)
    objective = objectives.pretraining(nsp=True)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(parameters, batch):
        sums = objective.sums(nnx.merge(graph, parameters), batch, None)
        means = objectives.divide(sums, objective.denominators(batch))
        return means["mlm_loss"] + means["nsp_loss"], means

    plain, packed = (rows_of(dataset, most=most, left_to_right=is_decoder) for most in (1, 6))
    few = np.arange(16)
    which, _ = packed.instances(few)
    everything, _ = plain.instances(np.arange(plain.size))
    row_of = {int(instance): row for row, instance in enumerate(everything[:, 0])}
    alone = plain.rows(np.array(sorted(row_of[int(instance)] for instance in which[which >= 0])))
    results = [loss(parameters, batch) for batch in (alone, packed.rows(few))]
    (_, one), one_gradients = results[0]
    (_, other), other_gradients = results[1]
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-5, err_msg=name)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(one_gradients))
    assert_close(one_gradients, other_gradients, rtol=1e-5, atol=1e-5 * scale)
