"""Texts of one's own: columns, labels and classes."""

import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from bert_jax.errors import InputError
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.task import BadRows, Split
from bert_jax.finetuning.tasks import text as metrics
from bert_jax.finetuning.tasks.text import TextExample, TextTask

SCORES = TextTask(kind="regress")


def write(path: Path, content: str) -> Path:
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    return path


def classes_of(path: Path, bad_rows: BadRows | None = None) -> tuple[str, ...]:
    return TextTask().read_training(str(path), bad_rows or BadRows(strict=True))[0].classes


def read(
    path: Path, task: TextTask | None = None, bad_rows: BadRows | None = None, **options
) -> list[TextExample]:  # fmt: skip
    return (task or TextTask()).read(str(path), bad_rows or BadRows(strict=True), **options)


def test_named_columns_are_read(tmp_path: Path):
    path = write(tmp_path / "a.csv", "key,text,query,stars\n7,no,yes,4.5\n")
    task = TextTask(kind="regress", texts=("query", "text"), label="stars")
    assert read(path, task) == [TextExample("1", "yes", "no", 4.5)]
    assert read(path, TextTask(texts=("text",)), labels="ignored", columns=["query"]) == [TextExample("1", "yes")]
    for task, columns, problem in (
        (TextTask(), (), "missing label in 'label'"), (TextTask(texts=("body",)), (), "'body' among .*'query'"),
        (TextTask(), ("key", "text", "query"), r"\b3\b"), (TextTask(texts=("text",)), ("text", "query"), r"2 .* 1\b"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=problem):
            read(path, task, columns=columns, labels="ignored" if columns else "required")


@pytest.mark.parametrize(
    ("written", "classes"),
    [
        (["10", "9", "2"], ("2", "9", "10")),
        ([10, 9, 2], ("2", "9", "10")),
        (["b", "10", "a"], ("10", "a", "b")),
        ([True, False], ("false", "true")),
        ([1.5, 1], ("1", "1.5")),
        ([0.0, "1.0", 1], ("0", "1")),
        (["1.0", "a.0", "a"], ("1", "a", "a.0")),
        (["a ", "a", "\tb"], ("a", "b")),
    ],
)
def test_classes_of_a_training_file(tmp_path: Path, written: list, classes: tuple[str, ...], caplog):
    rows = "\n".join(json.dumps({"text": "a", "label": label}) for label in written)
    assert classes_of(write(tmp_path / "a.jsonl", rows)) == classes
    assert ("2 classes, such as 1.5; for scores set task.regression" in caplog.text) == ("1.5" in classes)


def test_labels_that_training_did_not_have_are_bad(tmp_path: Path):
    path = write(tmp_path / "dev.csv", "text,label\na,good\nb,ugly\nc,bad\n")
    task, bad_rows = TextTask(classes=("good", "bad")), BadRows()
    assert [example.label for example in read(path, task, bad_rows)] == ["good", "bad"]
    assert bad_rows.counts == {str(path): 1}
    for strict in ("strict", "strict_labels"):
        with pytest.raises(InputError, match=r"dev\.csv:3: .*'ugly'.*'good', 'bad'"):
            read(path, task, BadRows(**{strict: True}))


@pytest.mark.parametrize("classes", [("0", "1"), ("0.0", "1.0"), ("1.0", "0")])
def test_whole_numbers_are_the_classes_of_a_model(tmp_path: Path, classes: tuple[str, ...]):
    rows = "\n".join(json.dumps({"text": "a", "label": label}) for label in (0, 1.0, "0.0", "1"))
    found = [example.label for example in read(write(tmp_path / "a.jsonl", rows), TextTask(classes=classes))]
    assert sorted(found, key=float) == sorted([*classes, *classes], key=float)


def test_labels_are_ignored_in_texts_to_predict(tmp_path: Path):
    path = write(tmp_path / "a.tsv", "text\tlabel\na\t?\nb\t\n")
    assert read(path, TextTask(classes=("x", "y")), labels="ignored") == [TextExample("1", "a"), TextExample("2", "b")]


@pytest.mark.parametrize(
    ("kind", "row", "problem"),
    [
        (".csv", " ,1", "'text'"),
        (".csv", "a, ", "'label'"),
        (".tsv", "a", r"\b2\b.*\b1\b"),
        (".jsonl", '{"text": null, "label": "1"}', "'text'"),
        (".jsonl", '{"text": 5, "label": "1"}', r"'text'.*\bint\b"),
        (".jsonl", '{"text": "a", "label": NaN}', "missing.*'label'"),
        (".jsonl", '{"text": "a", "label": ["1"]}', r"label.*\blist\b"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("task", [TextTask(), SCORES], ids=["classes", "scores"])
def test_bad_rows_are_named_and_skipped(tmp_path: Path, kind: str, row: str, problem: str, task: TextTask):
    good = {".csv": "a,1", ".tsv": "a\t1", ".jsonl": '{"text": "a", "label": "1"}'}[kind]
    header = {".csv": "text,label", ".tsv": "text\tlabel", ".jsonl": good}[kind]
    path = write(tmp_path / f"a{kind}", "\n".join([header, good, row, good]) + "\n")
    bad_rows = BadRows()
    assert [example.id for example in read(path, task, bad_rows)][-2:] == (["2", "4"] if header == good else ["1", "3"])
    assert bad_rows.counts == {str(path): 1}
    with pytest.raises(InputError) as error:
        read(path, task)
    assert str(error.value).startswith(f"{path}:3: ")
    assert re.search(problem, str(error.value))


@pytest.mark.parametrize("label", ["high", "nan", "inf", "-1e39", True, "", 10**400], ids=str)
def test_scores_are_finite_numbers(tmp_path: Path, label: object):
    rows = [{"text": "a", "label": value} for value in ("-2", 3, label)]
    path, bad_rows = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))), BadRows()
    assert [example.label for example in read(path, SCORES, bad_rows)] == [-2.0, 3.0]
    assert bad_rows.counts == {str(path): 1}


def test_scores_are_compared_with_all_their_digits():
    """Unix times differ by less than fp32's step of 128."""
    examples = [TextExample(str(second), "a", label=1.7e9 + second) for second in range(50)]
    split = Split("dev", examples, EncodedExamples([]), is_labelled=True)
    assert SCORES.score(split, [np.array([second], np.float32) for second in range(50)]) == pytest.approx(
        {"spearman": 1.0, "pearson": 1.0}
    )


def test_files_without_a_row_or_a_second_class_are_refused(tmp_path: Path):
    for content in ("text,label\n", "text,label\n,1\n"):
        with pytest.raises(InputError, match=r"b\.csv: "):
            read(write(tmp_path / "b.csv", content), bad_rows=BadRows())
    with pytest.raises(InputError, match=r"b\.csv: .*\b2\b.*'good'"):
        classes_of(write(tmp_path / "b.csv", "text,label\na,good\n"))


def test_given_pairs_are_as_many_as_in_training():
    pairs = TextTask(texts=("a", "b"), classes=("x", "y"))
    assert pairs.from_texts(["a"], ["b"]) == [TextExample("0", "a", "b")]
    for task, given in ((pairs, ["c", None]), (TextTask(texts=("a",)), ["c", "d"])):
        with pytest.raises(InputError, match="pair"):
            task.from_texts(["a", "b"], given)


# --- Metrics, against scikit-learn; correlations are SciPy's -----------------------------------------------------


def random_classes(seed: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    count = rng.integers(1, 40)
    labels = rng.integers(0, classes, count)
    return labels, np.where(rng.random(count) < 0.5, labels, rng.integers(0, classes, count))


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_classification_is_scikit_learns(classes: int):
    sklearn = pytest.importorskip("sklearn.metrics")
    for seed in range(30):
        y, p = random_classes(seed, classes)
        assert metrics.accuracy(y, p) == pytest.approx(sklearn.accuracy_score(y, p), abs=1e-12)
        with warnings.catch_warnings(action="ignore"):
            if classes == 2:
                expected = sklearn.matthews_corrcoef(y, p)
                assert metrics.METRICS["matthews"](y, p) == pytest.approx(expected, abs=1e-12)
                for label in (0, 1):
                    expected = sklearn.f1_score(y, p, pos_label=label, zero_division=0)
                    assert metrics.f1(y, p, label) == pytest.approx(expected, abs=1e-12)
            macro = sklearn.f1_score(y, p, average="macro", zero_division=0)
            assert metrics.f1_macro(y, p) == pytest.approx(macro, abs=1e-12)


def test_by_hand():
    labels, predictions = [1, 1, 0, 0], [1, 0, 1, 0]
    assert metrics.compute_metrics(["accuracy", "f1"], labels, predictions) == {"accuracy": 0.5, "f1": 0.5}
    scores = metrics.compute_metrics(["pearson", "spearman", "matthews"], [1, 2, 3, 4], [1, 4, 9, 16])
    assert scores == {"pearson": pytest.approx(0.984, abs=1e-3), "spearman": 1.0, "matthews": scores["pearson"]}


@pytest.mark.parametrize("name", ["matthews", "pearson", "spearman"])
def test_correlations_without_an_answer_are_zero(name: str):
    metric = metrics.METRICS[name]
    for constant in ([0, 0, 0], [1.5], [0.1, 0.1, 0.1]):
        assert metric(constant, constant) == 0.0
    # Their mean is not quite 0.1 in floating point: what is left over is no answer.
    assert metric([0.1, 0.1, 0.1], [0.1, 0.3, 0.7]) == metric([0.1, 0.3, 0.7], [0.1, 0.1, 0.1]) == 0.0
