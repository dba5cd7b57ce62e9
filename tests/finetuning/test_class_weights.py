"""Weights of the classes in the training loss."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import FinetuneConfig, load_config
from bert_jax.errors import InputError
from bert_jax.finetuning.finetune import finetune
from bert_jax.finetuning.losses import class_weights, task_objective
from bert_jax.finetuning.tasks.kinds import read_task
from bert_jax.model.task_heads import TaskHead
from bert_jax.training.checkpoints import open_checkpoint
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


@pytest.mark.parametrize("parts", [1, 3])
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
    weights = class_weights("balanced", ("a", "b", "c", "d"), labels)
    assert weights == pytest.approx((10 / (3 * 6), 10 / (3 * 3), 1.0, 10 / (3 * 1)))  # no example is c
    tokens = [np.array([-1, 0, 0, 1], np.int32), np.array([-1, 0], np.int32)]
    assert class_weights("balanced", ("O", "B-SEA"), tokens) == pytest.approx((4 / (2 * 3), 4 / (2 * 1)))


def test_weights_by_label_are_1_for_others():
    labels = np.array([0, 1, 2], np.int32)
    assert class_weights('{"bad": 2.5}', ("bad", "fair", "good"), labels) == (2.5, 1.0, 1.0)
    assert class_weights("{'good': 2, 'bad': 0}", ("bad", "fair", "good"), labels) == (0.0, 1.0, 2.0)
    assert class_weights("", ("bad", "fair", "good"), labels) == ()


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ("{'ugly': 1}", "'ugly'.*'bad', 'good'"),
        ("{'bad': -1}", "'bad': .*-1"),
        ("{'bad': 'much'}", "'bad': .*'much'"),
        ("{'bad': 1e999}", "'bad': .*inf"),
        ("{'bad': 1e300}", r"'bad': .*1e\+300"),
        ("{'bad': 1e-300, 'good': 1e-300}", "'bad': .*1e-300"),
        ("{'bad': 0, 'good': 0}", "weight 0"),
        ("bad=2", r"bad=2.*balanced.*\{'bad'"),
        ("{}", "balanced"),
        ("[1, 2]", "balanced"),
    ],
)
def test_invalid_weights_are_refused(setting: str, match: str):
    with pytest.raises(InputError, match=rf"task\.class_weights.*{match}"):
        class_weights(setting, ("bad", "good"), np.array([0, 1], np.int32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.csv").write_text("text,label,number\n" + "the ship .,sea,0.5\nthe owl .,night,1.5\n" * 8)
    (tmp_path / "dev.csv").write_text("text,label\nthe ship .,sea\nthe owl .,night\nthe owl .,night\n")
    return tmp_path


def test_class_of_weight_0_is_not_learned(checkpoint: Path, folder: Path):
    settings = {
        "init": checkpoint, "data.path": folder, "task.train": "train.csv", "task.dev": "dev.csv",
        "task.max_seq_len": 16, "num_epochs": 6, "global_batch_size": 8, "optimizer.learning_rate": 1e-2,
        "task.class_weights": "{'night': 0}", "gradient_accumulation": 2,
    }  # fmt: skip
    config = load_config("finetune/text", settings, kind=FinetuneConfig)
    assert finetune(config, str(folder / "run"))["dev"]["accuracy"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        ("text", {"task.train": "train.csv", "task.label": "number", "task.regression": True}),
        ("glue:stsb", {}),
    ],
)
def test_tasks_without_classes_refuse_weights(spec: str, settings: dict, checkpoint: Path, folder: Path):
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text("sentence1\tsentence2\tscore\nthe ship .\tthe owl .\t2.5\n")
    common = {"init": checkpoint, "data.path": folder, "task.class_weights": "balanced", "task.max_seq_len": 16}
    values = {**common, **settings}
    config = load_config(f"finetune/{spec}", values, kind=FinetuneConfig)
    with pytest.raises(InputError, match=r"task\.class_weights=balanced"):
        finetune(config, str(folder / "run"))
    assert not (folder / "run").exists()


def test_labels_of_a_task_are_checked_with_its_files(checkpoint: Path, tmp_path: Path):
    (tmp_path / "train.conll").write_text("the O\nship B-SEA\n")
    values = {"init": checkpoint, "data.path": tmp_path, "task.class_weights": "{'B-SKY': 2.0}"}
    config = load_config("finetune/ner", values, kind=FinetuneConfig)
    with pytest.raises(InputError, match=r"task\.class_weights.*'B-SKY'.*'O', 'B-SEA', 'I-SEA'"):
        read_task(config, open_checkpoint(str(checkpoint)).tokenizer)
