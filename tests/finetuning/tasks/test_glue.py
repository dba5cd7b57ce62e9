"""GLUE's files, as they are distributed."""

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from bert_jax.errors import InputError
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.rows import BadRows
from bert_jax.finetuning.task import Split
from bert_jax.finetuning.tasks.glue import TASKS, GlueTask
from bert_jax.finetuning.tasks.text import TextExample

MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
)
MNLI_ROW = '31193\t31193n\tgovernment\t( a )\t( b )\t(ROOT a)\t(ROOT b)\tConceptually so.\tIt has "two" parts.'

# task, split: the file, and the examples that are in it
LAYOUTS = {
    ("cola", "train"): ("train.tsv", "gj04\t1\t\tA \"quote\nbc01\t0\t*\tOf much.\n",
                        [("1", 'A "quote', None, "1"), ("2", "Of much.", None, "0")]),
    ("cola", "test"): ("test.tsv", "index\tsentence\n0\tBill sang.\n1\tSang Bill.\n",
                       [("0", "Bill sang.", None, None), ("1", "Sang Bill.", None, None)]),
    ("sst2", "dev"): ("dev.tsv", "sentence\tlabel\nit 's fine . \t1\nbleak \t0\n",
                      [("1", "it 's fine . ", None, "1"), ("2", "bleak ", None, "0")]),
    ("sst2", "test"): ("test.tsv", "index\tsentence\n0\tfine .\n", [("0", "fine .", None, None)]),
    ("mrpc", "dev"): ("dev.tsv", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t13\t14\tYes\t\" No\n",
                      [("1", "Yes", '" No', "1")]),
    ("mrpc", "test"): ("test.tsv", "\ufeffindex\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t10\t11\tOne .\tTwo .\n",
                       [("0", "One .", "Two .", None)]),
    ("stsb", "train"): (
        "train.tsv",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        "5\tmain\tMSRvid\t2012\t0001\tnone\tnone\tA plane.\tAn air plane.\t3.800\n",
        [("5", "A plane.", "An air plane.", 3.8)]),
    ("stsb", "test"): (
        "test.tsv",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\n"
        "0\tmain\tMSRvid\t2012\t0001\tnone\tnone\tA plane.\tAn air plane.\n",
        [("0", "A plane.", "An air plane.", None)]),
    ("qqp", "train"): (
        "train.tsv",
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n133273\t213221\t213222\tHow?\tWhy?\t0\n7\t1\t2\tA?\tA?\t1\n",
        [("133273", "How?", "Why?", "0"), ("7", "A?", "A?", "1")]),
    ("qqp", "test"): ("test.tsv", "id\tquestion1\tquestion2\n0\tHow?\tWhy?\n", [("0", "How?", "Why?", None)]),
    ("mnli", "train"): (
        "train.tsv",
        f"{MNLI}\tsentence1\tsentence2\tlabel1\tgold_label\n0\t{MNLI_ROW}\tneutral\tneutral\n",
        [("0", "Conceptually so.", 'It has "two" parts.', "neutral")]),
    ("mnli", "dev_matched"): (
        "dev_matched.tsv",
        f"{MNLI}\tsentence1\tsentence2\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label\n"
        f"0\t{MNLI_ROW}\tneutral\tneutral\tneutral\tneutral\tneutral\tcontradiction\n",
        [("0", "Conceptually so.", 'It has "two" parts.', "contradiction")]),
    ("mnli", "dev_mismatched"): (
        "dev_mismatched.tsv",
        f"{MNLI}\tsentence1\tsentence2\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label\n"
        f"0\t{MNLI_ROW}\tneutral\tneutral\tneutral\tneutral\tneutral\tentailment\n",
        [("0", "Conceptually so.", 'It has "two" parts.', "entailment")]),
    ("mnli", "test_matched"): ("test_matched.tsv", f"{MNLI}\tsentence1\tsentence2\n0\t{MNLI_ROW}\n",
                               [("0", "Conceptually so.", 'It has "two" parts.', None)]),
    ("mnli", "test_mismatched"): ("test_mismatched.tsv", f"{MNLI}\tsentence1\tsentence2\n9847\t{MNLI_ROW}\n",
                                  [("9847", "Conceptually so.", 'It has "two" parts.', None)]),
    ("mnli", "diagnostic"): ("diagnostic.tsv", "index\tsentence1\tsentence2\n0\tThe cat sat.\tIt did not.\n",
                             [("0", "The cat sat.", "It did not.", None)]),
    ("qnli", "dev"): (
        "dev.tsv",
        "index\tquestion\tsentence\tlabel\n0\tWhat?\tThat.\tentailment\n1\tWho?\tHe.\tnot_entailment\n",
        [("0", "What?", "That.", "entailment"), ("1", "Who?", "He.", "not_entailment")]),
    ("qnli", "test"): ("test.tsv", "index\tquestion\tsentence\n0\tWhat?\tThat.\n", [("0", "What?", "That.", None)]),
    ("rte", "train"): ("train.tsv", "index\tsentence1\tsentence2\tlabel\n0\tNo WMD.\tWMD.\tnot_entailment\n",
                       [("0", "No WMD.", "WMD.", "not_entailment")]),
    ("wnli", "train"): ("train.tsv", "index\tsentence1\tsentence2\tlabel\r\n0\tI stuck it.\tIt leaked.\t1\r\n",
                        [("0", "I stuck it.", "It leaked.", "1")]),
}  # fmt: skip


def read(folder: Path, name: str, split: str, bad_rows: BadRows | None = None) -> list[TextExample]:
    task = GlueTask.of(name)
    labels = "ignored" if split in TASKS[name].submissions else "required"
    path = task.find(str(folder), {})[split]
    return task.read(path, bad_rows or BadRows(strict=True), split=split, labels=labels)


@pytest.mark.parametrize(("task", "split"), LAYOUTS, ids="-".join)
@pytest.mark.parametrize("inside", [True, False])
def test_layouts(tmp_path: Path, task: str, split: str, inside: bool):
    name, content, expected = LAYOUTS[task, split]
    folder = tmp_path / TASKS[task].folders[0] if inside else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content.encode())
    examples = [TextExample(*fields) for fields in expected]
    assert read(tmp_path, task, split) == examples
    # A path alone has the same examples, whatever it is to be read for.
    again = GlueTask.of(task).read(str(folder / name), BadRows(strict=True), labels="ignored")
    assert again == [dataclasses.replace(example, label=None) for example in examples]


@pytest.mark.parametrize(
    ("task", "rows", "problem"),
    [
        ("qqp", ["3\t1\t2\tHow?"], r"\b6\b.*\b4\b"),
        ("qqp", ["3\t1\t2\tHow?\tWhy?\t0\textra"], r"\b6\b.*\b7\b"),
        ("qqp", ["3\t1\t2\tHow?\tWhy?\t2"], "'2'.*'0', '1'"),
        ("qqp", ["3\t1\t2\tHow?\tWhy?\t"], "'is_duplicate'"),
        ("qqp", ["3\t1\t2\tHow?\t \t0"], "question2"),
        ("qqp", ["3\t1\t2\tHow?\t\udcff\t0"], "UTF-8.*0xff"),
        ("stsb", ["0\tm\tf\t12\t1\tn\tn\tA.\tB.\t5.1"], r"5\.1.*\b0\b.*\b5\b"),
        ("stsb", ["0\tm\tf\t12\t1\tn\tn\tA.\tB.\tnan"], "nan"),
        ("stsb", ["0\tm\tf\t12\t1\tn\tn\tA.\tB.\thigh"], "'high'"),
        ("mnli", [f"0\t{MNLI_ROW}\tneutral\t-"], "'-'"),
    ],
)  # fmt: skip
def test_bad_rows_are_named_and_skipped(tmp_path: Path, caplog, task: str, rows: list[str], problem: str):
    _, content, expected = LAYOUTS[task, "train"]
    path = tmp_path / "train.tsv"
    header, *good = content.splitlines()
    path.write_bytes("\n".join([header, *rows, *good, *rows]).encode("utf-8", "surrogateescape"))
    bad_rows = BadRows()
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, task, "train", bad_rows) == [TextExample(*fields) for fields in expected]
    assert bad_rows.counts == {str(path): 2}
    assert f"{path}:2: " in caplog.text
    with pytest.raises(InputError, match=problem) as error:
        read(tmp_path, task, "train")
    assert str(error.value).startswith(f"{path}:2: ")


def test_microsofts_files_of_mrpc(tmp_path: Path):
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    train = [header, '1\t702876\t702977\tAmrozi "so".\tReferring.', "0\t21\t22\tYuca.\tBought.", "1\t5\t6\tA.\tB."]
    (tmp_path / "msr_paraphrase_train.txt").write_text("\r\n".join(train) + "\r\n", newline="")
    (tmp_path / "msr_paraphrase_test.txt").write_text(f"{header}\r\n1\t8\t9\tPCCW.\tCurrent.\r\n", newline="")
    with pytest.raises(InputError, match=r"dev_ids\.tsv"):
        read(tmp_path, "mrpc", "dev")
    (tmp_path / "dev_ids.tsv").write_text("21\t22\n")
    assert [(example.id, example.text_a) for example in read(tmp_path, "mrpc", "train")] == [
        ("1", 'Amrozi "so".'), ("3", "A."),
    ]  # fmt: skip
    assert read(tmp_path, "mrpc", "dev") == [TextExample("2", "Yuca.", "Bought.", "0")]
    assert read(tmp_path, "mrpc", "test") == [TextExample("1", "PCCW.", "Current.")]
    task = GlueTask.of("mrpc")
    assert len(task.read(str(tmp_path / "msr_paraphrase_train.txt"), BadRows(strict=True))) == 3  # of no split


@pytest.mark.parametrize("place", ["diagnostic/diagnostic.tsv", "AX/AX.tsv"])
def test_the_diagnostic_set_may_have_a_folder_of_its_own(tmp_path: Path, place: str):
    (tmp_path / place).parent.mkdir()
    (tmp_path / place).write_text(LAYOUTS["mnli", "diagnostic"][1])
    (tmp_path / "MNLI").mkdir()
    for folder in (tmp_path, tmp_path / "MNLI"):
        assert len(read(folder, "mnli", "diagnostic")) == 1


def test_unusable_files_and_unknown_names_are_refused(tmp_path: Path):
    for content, problem in (("index\tsentence1\tsentence2\n0\ta\tb\n", "'label'.*'index', 'sentence1', 'sentence2'"),
                             ("index\tsentence1\tsentence2\tlabel\n0\t\tb\tentailment\n", "sentence1"),
                             ("", "empty")):  # fmt: skip
        (tmp_path / "train.tsv").write_text(content)
        with pytest.raises(InputError, match=rf"train\.tsv:.*{problem}"):
            read(tmp_path, "rte", "train", BadRows())
    with pytest.raises(InputError, match=r"'snli'.*cola, sst2"):
        GlueTask.of("snli")
    with pytest.raises(InputError, match=r"task\.dev=mine\.tsv"):
        GlueTask.of("rte").find(str(tmp_path), {"train": "", "dev": "mine.tsv"})


def test_tasks_are_found_by_their_written_names():
    for name, spec in TASKS.items():
        assert GlueTask.of(spec.folders[0]).name == f"glue/{name}"
    assert list(TASKS) == ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]
    assert [name for name in TASKS if GlueTask.of(name).regression] == ["stsb"]
    main = ["matthews", "accuracy", "f1", "spearman", "f1", *["accuracy"] * 4]  # of the paper
    assert [GlueTask.of(name).main_metric for name in TASKS] == main


def test_an_empty_text_of_a_test_split_is_predicted_like_others(tmp_path: Path):
    (tmp_path / "test.tsv").write_text("id\tquestion1\tquestion2\n0\t\tWhy?\n")
    assert read(tmp_path, "qqp", "test") == [TextExample("0", "", "Why?")]


def submit(task: GlueTask, split: str, ids: list[str], outputs: list, folder: Path) -> None:
    examples = [TextExample(identity, "a") for identity in ids]
    task.write(Split(split, examples, EncodedExamples([])), [np.array(row) for row in outputs], epath.Path(folder))


@pytest.mark.parametrize(
    ("task", "split", "name", "predictions", "written"),
    [
        ("cola", "test", "CoLA.tsv", [1, 0], ["1", "0"]),
        ("sst2", "test", "SST-2.tsv", [0, 1], ["0", "1"]),
        ("mrpc", "test", "MRPC.tsv", [0, 1], ["0", "1"]),
        ("stsb", "test", "STS-B.tsv", [5.25, -0.5], ["5.000", "0.000"]),
        ("stsb", "test", "STS-B.tsv", [1.23456, 3], ["1.235", "3.000"]),
        ("qqp", "test", "QQP.tsv", [0, 1], ["0", "1"]),
        ("mnli", "test_matched", "MNLI-m.tsv", [0, 1], ["entailment", "neutral"]),
        ("mnli", "test_mismatched", "MNLI-mm.tsv", [2, 1], ["contradiction", "neutral"]),
        ("mnli", "diagnostic", "AX.tsv", [2, 0], ["contradiction", "entailment"]),
        ("qnli", "test", "QNLI.tsv", [0, 1], ["entailment", "not_entailment"]),
        ("rte", "test", "RTE.tsv", [1, 0], ["not_entailment", "entailment"]),
        ("wnli", "test", "WNLI.tsv", [1, 0], ["1", "0"]),
    ],
)
def test_submissions(tmp_path: Path, caplog, task: str, split: str, name: str, predictions: list, written: list[str]):
    glue = GlueTask.of(task)
    outputs = [[score] for score in predictions] if glue.regression else np.eye(glue.size)[predictions]
    submit(glue, split, ["0", "1"], outputs, tmp_path / "new")
    assert (tmp_path / "new" / name).read_text() == f"index\tprediction\n0\t{written[0]}\n1\t{written[1]}\n"
    assert not caplog.text


def test_a_submission_without_all_rows_is_logged(tmp_path: Path, caplog):
    submit(GlueTask.of("rte"), "test", ["1"], [[1.0, 0.0]], tmp_path)
    assert "glue/rte test: " in caplog.text
    assert (tmp_path / "RTE.tsv").read_text() == "index\tprediction\n1\tentailment\n"


@pytest.mark.parametrize(
    ("task", "train", "dev"),
    [("cola", 8_551, 1_043), ("sst2", 67_349, 872), ("mrpc", 3_668, 408), ("stsb", 5_749, 1_500)],
)
def test_real_files(data_dir: Path, task: str, train: int, dev: int):
    for split, count in (("train", train), ("dev", dev)):
        assert len(read(data_dir / "glue", task, split)) == count
