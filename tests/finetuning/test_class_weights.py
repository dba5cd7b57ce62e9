"""Weights of the classes in the training loss."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import FinetuneConfig, load_config
from bert_jax.errors import InputError
from bert_jax.finetuning import run
from bert_jax.finetuning.finetune import finetune
from bert_jax.finetuning.losses import balanced_weights, task_objective
from bert_jax.model.task_heads import TaskHead
from bert_jax.training.objectives import divide

WEIGHTS = (0.5, 2.0, 3.0)


def means(kind: str, outputs: np.ndarray, labels: np.ndarray, rows: np.ndarray, parts: int = 1) -> dict[str, float]:
    """Returns the loss and the accuracy of a batch whose sums are those of `parts` microbatches."""
    objective = task_objective(TaskHead(kind, outputs.shape[-1]), WEIGHTS)
    batch = {"labels": jnp.asarray(labels), "weights": jnp.asarray(rows, jnp.float32)}
    total = {"loss": 0.0, "accuracy": 0.0}
    for part in np.split(np.arange(len(rows)), parts):
        logits = jnp.asarray(outputs[part], jnp.float32)
        chosen = {name: array[part] for name, array in batch.items()}
        sums = objective.sums(lambda batch, keys, logits=logits: logits, chosen, None)
        total = {name: total[name] + sums[name] for name in total}
    return {name: float(value) for name, value in divide(total, objective.denominators(batch)).items()}


def losses_of(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.log(np.exp(outputs).sum(axis=-1)) - np.take_along_axis(outputs, labels[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize("parts", [3])
def test_loss_is_the_weighted_mean_and_the_accuracy_is_not_weighted(parts: int):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    outputs, labels = rng.normal(size=(6, 3)), np.array([2, 0, 1, 1, 0, 2], np.int32)
    got = means("classify", outputs, labels, np.array([1, 1, 1, 1, 1, 0]), parts)
    weights = np.array(WEIGHTS)[labels[:5]]
    assert got["loss"] == pytest.approx((weights * losses_of(outputs, labels)[:5]).sum() / weights.sum(), rel=1e-5)
    theirs = torch.nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS, dtype=torch.float64))
    expected = theirs(torch.tensor(outputs[:5]), torch.tensor(labels[:5].astype(np.int64)))
    assert got["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert got["accuracy"] == pytest.approx((outputs.argmax(-1) == labels)[:5].mean())


def test_loss_of_tags_is_weighted_by_tagged_token():
    torch = pytest.importorskip("torch")
    outputs = np.random.default_rng(1).normal(size=(3, 4, 3))
    labels = np.array([[0, 1, -1, 2], [-1, 2, 2, -1], [0, 0, 0, 0]], np.int32)
    got = means("tag", outputs, labels, np.array([1, 1, 0]))
    theirs = torch.nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS, dtype=torch.float64), ignore_index=-1)
    expected = theirs(torch.tensor(outputs[:2]).transpose(1, 2), torch.tensor(labels[:2].astype(np.int64)))
    assert got["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert got["accuracy"] == pytest.approx((outputs.argmax(-1) == labels)[:2][labels[:2] >= 0].mean())


def test_balanced_weights_are_those_of_scikit_learn():
    labels = np.array([0] * 6 + [1] * 3 + [3], np.int32)
    assert balanced_weights(4, labels) == pytest.approx((10 / (3 * 6), 10 / (3 * 3), 1.0, 10 / (3 * 1)))  # none is 2
    tokens = [np.array([-1, 0, 0, 1], np.int32), np.array([-1, 0], np.int32)]
    assert balanced_weights(2, tokens) == pytest.approx((4 / (2 * 3), 4 / (2 * 1)))


def test_run_weights_its_classes(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "plan_step", lambda *args: pytest.fail(str(args[-1])))
    (tmp_path / "train.csv").write_text(
        "text,label\nthe ship .,sea\nthe owl .,night\nthe owl .,night\nthe fox .,night\n"
    )
    settings = {
        "init": checkpoint, "data.path": tmp_path, "task.train": "train.csv", "task.max_seq_len": 16,
        "task.class_weights": "balanced",
    }  # fmt: skip
    with pytest.raises(pytest.fail.Exception, match=r"\(0\.66\d+, 2\.0\)"):
        finetune(load_config("finetune/text", settings, kind=FinetuneConfig), str(tmp_path / "run"))
    with pytest.raises(InputError, match=r"task\.class_weights=much"):
        load_config("finetune/text", {**settings, "task.class_weights": "much"}, kind=FinetuneConfig)


def test_tasks_without_classes_refuse_weights(checkpoint: Path, tmp_path: Path):
    (tmp_path / "train.tsv").write_text("sentence1\tsentence2\tscore\nthe ship .\tthe owl .\t2.5\n")
    values = {"init": checkpoint, "data.path": tmp_path, "task.class_weights": "balanced", "task.max_seq_len": 16}
    with pytest.raises(InputError, match=r"task\.class_weights=balanced"):
        finetune(load_config("finetune/glue:stsb", values, kind=FinetuneConfig), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
