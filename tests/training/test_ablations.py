"""The paper's ablations of pre-training tasks as switches: each changes the loss and the attention as it says."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx
from support import batches, helpers, models
from support.devices import all_devices, one_device  # noqa: F401

from bert_jax.batch import Batch, map_arrays
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import TrainRows, next_token_targets
from bert_jax.errors import InputError
from bert_jax.inference.pretrained import load
from bert_jax.model import BertConfig, initialize
from bert_jax.tracking.metrics import read_metrics
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.evaluation import evaluate_checkpoint, unigram_nats
from bert_jax.training.objectives import divide, pretraining
from bert_jax.training.pretrain import pretrain

SIZES = {
    "vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip
ROWS, LENGTH = 4, 16
PAPER = pretraining(nsp=True)


def make_batch() -> Batch[jax.Array]:
    sequence_ids = (np.arange(LENGTH) < np.array([16, 12, 9, 16])[:, None]).astype(np.int32)
    batch = batches.make_batch(vocab_size=200, sequence_ids=sequence_ids)
    return map_arrays(jnp.asarray, {**batch, **next_token_targets(batch["input_ids"], sequence_ids)})


@functools.cache
def compiled_gradients() -> tuple[Callable, dict]:
    graph, parameters = models.initialize(BertConfig(**SIZES))

    def loss(parameters, batch):
        sums = PAPER.sums(nnx.merge(graph, parameters), batch, None)
        means = divide(sums, PAPER.denominators(batch))
        return means["mlm_loss"] + means["nsp_loss"]

    return jax.jit(jax.grad(loss)), parameters


def gradients_of(batch: dict[str, jax.Array]) -> dict:
    compiled, parameters = compiled_gradients()
    return compiled(parameters, batch)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_left_to_right_outputs_ignore_later_tokens(is_decoder: bool):
    graph, parameters = models.initialize(BertConfig(**SIZES, is_decoder=is_decoder))
    model = jax.jit(lambda batch: nnx.merge(graph, parameters)(batch))
    batch = make_batch()
    before, _ = model(batch)
    for position in (1, 7, 15):
        changed = batch["input_ids"].at[0, position].add(1)
        after, _ = model({**batch, "input_ids": changed})
        left = np.abs(after[0, :position] - before[0, :position]).max(axis=(0, 1), where=np.isfinite(before[0, 0]),
                                                                         initial=0)  # fmt: skip
        assert (left == 0) == is_decoder, position
        assert not np.array_equal(after[0, position:], before[0, position:])
        np.testing.assert_array_equal(after[1:], before[1:])
    if is_decoder:  # [CLS] sees itself alone: what follows moves neither its hidden state nor the next-sentence logits
        one, other = (
            model({**batch, "input_ids": ids}) for ids in (batch["input_ids"], batch["input_ids"].at[:, 1:].add(1))
        )
        np.testing.assert_array_equal(one[1], other[1])


def test_the_left_to_right_loss_is_the_mean_over_next_tokens():
    graph, parameters = models.initialize(BertConfig(**SIZES, is_decoder=True))
    batch = make_batch()

    @jax.jit
    def outputs(parameters, batch):
        model = nnx.merge(graph, parameters)
        return jax.nn.log_softmax(model(batch)[0]), PAPER.sums(model, batch, None)

    log_p, sums = jax.tree.map(np.asarray, outputs(parameters, batch))
    ids, lengths = np.asarray(batch["input_ids"]), np.asarray(batch["sequence_ids"]).sum(axis=1)
    costs = [-log_p[row, t, ids[row, t + 1]] for row in range(ROWS) for t in range(lengths[row] - 1)]
    means = divide(sums, PAPER.denominators(batch))
    assert float(means["mlm_loss"]) == pytest.approx(np.mean(costs), rel=1e-5)


def test_a_target_without_weight_moves_nothing():
    batch = make_batch()
    weights = batch["masked_weights"].at[:, 3].set(0.0)
    one = gradients_of({**batch, "masked_weights": weights})
    other = gradients_of({**batch, "masked_weights": weights, "masked_ids": batch["masked_ids"].at[:, 3].set(17)})
    jax.tree.map(np.testing.assert_array_equal, one, other)
    counted = gradients_of({**batch, "masked_ids": batch["masked_ids"].at[:, 3].set(17)})
    assert any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(counted), strict=True))


def test_a_left_to_right_run_learns_and_is_evaluated_left_to_right(dataset_dir: Path, tmp_path: Path):
    config = helpers.small_config(
        dataset_dir, objective__lm="ltr", objective__nsp=False, total_steps=40, eval_every_steps=20,
        checkpoint__every_steps=40, optimizer__learning_rate=2e-2,
    )  # fmt: skip
    final = pretrain(config, str(tmp_path / "run"))
    assert final["ltr_loss"] < final["unigram_loss"] - 0.5
    assert final["loss"] == final["ltr_loss"]
    assert open_checkpoint(str(tmp_path / "run")).bert_config.is_decoder
    evaluated = evaluate_checkpoint(open_checkpoint(str(tmp_path / "run")), str(dataset_dir))
    assert evaluated["ltr_loss"] < evaluated["unigram_loss"] - 0.5
    assert evaluated["loss"] == evaluated["ltr_loss"]
    rows = [row for row in read_metrics(epath.Path(tmp_path / "run")) if "split" not in row]
    assert rows[-1]["loss"] == rows[-1]["ltr_loss"]
    nsp_metrics = [
        key for row in (final, evaluated, *read_metrics(epath.Path(tmp_path / "run"))) for key in row
        if key.startswith("nsp_")
    ]  # fmt: skip
    assert nsp_metrics == []
    with pytest.raises(InputError, match=r"objective\.lm=ltr .*objective\.lm=mlm"):
        pretrain(helpers.small_config(dataset_dir, init=tmp_path / "run"), str(tmp_path / "other"))
    with pytest.raises(InputError, match=r"is_decoder|left-to-right"):
        load(str(tmp_path / "run")).fill_mask("the [MASK] sees the owl .")


def test_left_to_right_baseline_knows_how_often_sequences_end(dataset_dir: Path, other_dir: Path):
    """Against the frequencies of the targets themselves, counted over the training split."""
    datasets = [PreparedDataset(str(path)) for path in (dataset_dir, other_dir)]
    counts = np.ones(datasets[0].tokenizer.vocab_size)
    for dataset in datasets:
        rows = TrainRows(dataset, seed=0, masking=None)
        targets = rows.rows(np.arange(rows.size))
        counts += np.bincount(targets["masked_ids"][targets["masked_weights"] > 0], minlength=len(counts))
    sep, nats = datasets[0].tokenizer.sep_id, unigram_nats(datasets, left_to_right=True)
    assert nats[sep] == pytest.approx(-np.log(counts[sep] / counts.sum()), abs=0.02)
    assert np.exp(-nats).sum() == pytest.approx(1.0)
    assert unigram_nats(datasets, left_to_right=False)[sep] > nats[sep] + 3  # in documents there is none


def test_without_nsp_the_pooler_and_its_head_keep_their_values(dataset_dir: Path, tmp_path: Path):
    config = helpers.small_config(
        dataset_dir, objective__nsp=False, optimizer__name="lamb", total_steps=4, eval_every_steps=0, eval_batches=0
    )
    pretrain(config, str(tmp_path))
    checkpoint = open_checkpoint(str(tmp_path))
    trained = checkpoint.load_parameters()
    _, initial = initialize(checkpoint.bert_config, jax.random.fold_in(jax.random.key(config.seed), 0))
    for part in ("pooler", "nsp_head"):
        for kept, value in zip(jax.tree.leaves(trained[part]), jax.tree.leaves(initial[part]), strict=True):
            np.testing.assert_allclose(kept, value, rtol=1e-6)  # to the rounding of a compiled initialization
    assert not np.allclose(trained["mlm_head"]["kernel"], initial["mlm_head"]["kernel"])


def test_left_to_right_with_nsp_is_refused(dataset_dir: Path, tmp_path: Path):
    with pytest.raises(InputError, match=r"objective\.lm=ltr\b.*objective\.nsp=False"):
        pretrain(helpers.small_config(dataset_dir, objective__lm="ltr"), str(tmp_path))
    with pytest.raises(InputError, match=r"objective\.lm=clm: .*mlm, ltr"):
        pretrain(helpers.small_config(dataset_dir, objective__lm="clm"), str(tmp_path))
