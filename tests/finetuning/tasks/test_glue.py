"""GLUE's files, as they are distributed."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from bert_jax.config import FinetuneConfig, load_config
from bert_jax.errors import InputError
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.fine_tuned import read_task
from bert_jax.finetuning.task import BadRows, Split
from bert_jax.finetuning.tasks.text import TASKS, GlueTask, TextExample
from bert_jax.text.tokenizer import Tokenizer

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
    ("mrpc", "dev"): ("dev.tsv", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t13\t14\tYes\t\" No\n",
                      [("1", "Yes", '" No', "1")]),
    ("mrpc", "test"): ("test.tsv", "\ufeffindex\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t10\t11\tOne .\tTwo .\n",
                       [("0", "One .", "Two .", None)]),
    ("stsb", "train"): (
        "train.tsv",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        "5\tmain\tMSRvid\t2012\t0001\tnone\tnone\tA plane.\tAn air plane.\t3.800\n",
        [("5", "A plane.", "An air plane.", 3.8)]),
    ("qqp", "train"): (
        "train.tsv",
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n133273\t213221\t213222\tHow?\tWhy?\t0\n7\t1\t2\tA?\tA?\t1\n",
        [("133273", "How?", "Why?", "0"), ("7", "A?", "A?", "1")]),
    ("qqp", "test"): ("test.tsv", "id\tquestion1\tquestion2\n0\tHow?\tWhy?\n", [("0", "How?", "Why?", None)]),
    ("mnli", "train"): (
        "train.tsv",
        f"{MNLI}\tsentence1\tsentence2\tlabel1\tgold_label\n0\t{MNLI_ROW}\tneutral\tneutral\n",
        [("0", "Conceptually so.", 'It has "two" parts.', "neutral")]),
    ("mnli", "dev_mismatched"): (
        "dev_mismatched.tsv",
        f"{MNLI}\tsentence1\tsentence2\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label\n"
        f"0\t{MNLI_ROW}\tneutral\tneutral\tneutral\tneutral\tneutral\tentailment\n",
        [("0", "Conceptually so.", 'It has "two" parts.', "entailment")]),
    ("mnli", "test_matched"): ("test_matched.tsv", f"{MNLI}\tsentence1\tsentence2\n0\t{MNLI_ROW}\n",
                               [("0", "Conceptually so.", 'It has "two" parts.', None)]),
    ("mnli", "diagnostic"): ("diagnostic.tsv", "index\tsentence1\tsentence2\n0\tThe cat sat.\tIt did not.\n",
                             [("0", "The cat sat.", "It did not.", None)]),
    ("qnli", "dev"): (
        "dev.tsv",
        "index\tquestion\tsentence\tlabel\n0\tWhat?\tThat.\tentailment\n1\tWho?\tHe.\tnot_entailment\n",
        [("0", "What?", "That.", "entailment"), ("1", "Who?", "He.", "not_entailment")]),
    ("rte", "train"): ("train.tsv", "index\tsentence1\tsentence2\tlabel\n0\tNo WMD.\tWMD.\tnot_entailment\n",
                       [("0", "No WMD.", "WMD.", "not_entailment")]),
    ("wnli", "train"): ("train.tsv", "index\tsentence1\tsentence2\tlabel\r\n0\tI stuck it.\tIt leaked.\t1\r\n",
                        [("0", "I stuck it.", "It leaked.", "1")]),
}  # fmt: skip


def read(folder: Path, name: str, split: str, bad_rows: BadRows | None = None) -> list[TextExample]:
    task = GlueTask.of(name)
    labels = "ignored" if "test" in split or split == "diagnostic" else "required"
    path = task.find(str(folder), {})[split]
    return task.read(path, bad_rows or BadRows(strict=True), split=split, labels=labels)


def test_the_given_dev_file_comes_before_those_of_the_benchmark(tmp_path: Path):
    for name in ("train.tsv", "dev_matched.tsv", "mine.tsv"):
        (tmp_path / name).write_text("")
    found = GlueTask.of("mnli").find(str(tmp_path), {"dev": "mine.tsv"})
    assert next(split for split in found if split != "train") == "dev"
    assert found["dev_matched"]


@pytest.mark.parametrize(("task", "split"), LAYOUTS, ids="-".join)
@pytest.mark.parametrize("inside", [True, False])
def test_layouts(tmp_path: Path, task: str, split: str, inside: bool):
    name, content, expected = LAYOUTS[task, split]
    folder = tmp_path / TASKS[task].folder if inside else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content.encode())
    examples = [TextExample(*fields) for fields in expected]
    assert read(tmp_path, task, split) == examples
    # A path alone has the same examples, whatever it is to be read for.
    again = GlueTask.of(task).read(str(folder / name), BadRows(strict=True), labels="ignored")
    assert again == [dataclasses.replace(example, label=None) for example in examples]


@pytest.mark.parametrize(
    ("task", "row", "problem"),
    [
        ("qqp", "3\t1\t2\tHow?", r"\b6\b.*\b4\b"),
        ("qqp", "3\t1\t2\tHow?\tWhy?\t2", "'2'.*'0', '1'"),
        ("qqp", "3\t1\t2\tHow?\t \t0", "question2"),
        ("stsb", "0\tm\tf\t12\t1\tn\tn\tA.\tB.\thigh", "'high'"),
        ("mnli", f"0\t{MNLI_ROW}\tneutral\t-", "'-'"),
    ],
)
def test_bad_rows_are_named_and_skipped(tmp_path: Path, caplog, task: str, row: str, problem: str):
    _, content, expected = LAYOUTS[task, "train"]
    path = tmp_path / "train.tsv"
    header, *good = content.splitlines()
    path.write_text("\n".join([header, row, *good, row]))
    bad_rows = BadRows()
    assert read(tmp_path, task, "train", bad_rows) == [TextExample(*fields) for fields in expected]
    assert bad_rows.counts == {str(path): 2}
    assert f"{path}:2: " in caplog.text
    with pytest.raises(InputError, match=rf"^{path}:2: .*{problem}"):
        read(tmp_path, task, "train")


def test_examples_without_agreement_are_skipped_in_evaluation(tmp_path: Path):
    _, content, _ = LAYOUTS["mnli", "train"]
    (tmp_path / "train.tsv").write_text(f"{content}0\t{MNLI_ROW}\tneutral\t-\n")
    assert len(read(tmp_path, "mnli", "train", BadRows(strict_labels=True))) == 1


def test_diagnostic_set_has_a_folder_of_its_own_and_no_labels(tmp_path: Path, tokenizer: Tokenizer):
    for name in ("diagnostic", "MNLI"):
        (tmp_path / name).mkdir()
    (tmp_path / "diagnostic" / "diagnostic.tsv").write_text(LAYOUTS["mnli", "diagnostic"][1])
    (tmp_path / "MNLI" / "train.tsv").write_text(LAYOUTS["mnli", "train"][1])
    for folder in (tmp_path, tmp_path / "MNLI"):
        config = load_config("finetune/glue:mnli", [("data.path", str(folder))], kind=FinetuneConfig)
        _, _, (split,) = read_task(config, tokenizer)
        assert (split.name, len(split.examples), split.is_labelled) == ("diagnostic", 1, False)


def test_unusable_files_and_unknown_names_are_refused(tmp_path: Path):
    (tmp_path / "train.tsv").write_text("index\tsentence1\tsentence2\n0\ta\tb\n")
    with pytest.raises(InputError, match=r"train\.tsv: .*sentence1 and sentence2 and label.*train\.tsv:2: .*'label'"):
        read(tmp_path, "rte", "train", BadRows())
    with pytest.raises(InputError, match=r"'squad'.*cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli"):
        GlueTask.of("squad")
    assert GlueTask.of("STS-B").name == "glue/stsb"


def test_texts_of_a_test_file_may_be_empty(tmp_path: Path):
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
def test_submissions(tmp_path: Path, task: str, split: str, name: str, predictions: list, written: list[str]):
    glue = GlueTask.of(task)
    outputs = [[score] for score in predictions] if glue.regression else np.eye(glue.size)[predictions]
    submit(glue, split, ["0", "1"], outputs, tmp_path / "new")
    assert (tmp_path / "new" / name).read_text() == f"index\tprediction\n0\t{written[0]}\n1\t{written[1]}\n"


@pytest.mark.parametrize(
    ("task", "train", "dev"), [("cola", 8_551, 1_043), ("mrpc", 3_668, 408), ("stsb", 5_749, 1_500)]
)
def test_real_files(data_dir: Path, task: str, train: int, dev: int):
    for split, count in (("train", train), ("dev", dev)):
        assert len(read(data_dir / "glue", task, split)) == count
