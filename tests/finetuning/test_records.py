"""Records of tasks: a workdir, its export and the import of the export predict and score alike, whatever is set."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import helpers

from bert_jax.config import FinetuneConfig, load_config
from bert_jax.errors import InputError
from bert_jax.finetuning.fine_tuned import KINDS, evaluate_finetuned, predict, task_of
from bert_jax.finetuning.finetune import finetune
from bert_jax.inference.pretrained import open_model_of
from bert_jax.interop import huggingface
from bert_jax.interop.importing import import_checkpoint
from bert_jax.training.checkpoints import open_checkpoint

WORDS = [word for words in helpers.TOPICS.values() for word in words]
TEXTS = [" ".join((WORDS * 2)[number : number + 5 + number % 5]) for number in range(12)]


def rows(*columns: str, separator: str = ",", header: bool = True, pair: bool = False) -> str:
    lines = [separator.join(columns)] * header
    for number, text in enumerate(TEXTS):
        texts = (text, TEXTS[-number]) if pair else (text,)
        lines.append(separator.join((str(100 + number), *texts, str(number % 2))))
    return "\n".join(lines) + "\n"


def questions(answered: int) -> str:
    qas = [
        {"context": text, "qas": [{"id": f"q{number}", "question": text[:9], "is_impossible": number >= answered,
         "answers": [{"text": text.split()[3], "answer_start": text.index(text.split()[3])}] * (number < answered)}]}
        for number, text in enumerate(TEXTS)
    ]  # fmt: skip
    return json.dumps({"data": [{"title": "t", "paragraphs": qas}]})


TAGS = ("B-SEA", "O", "O")
TAGGED = "".join(
    "".join(["-DOCSTART- x O\n\n", *(f"{word} x {TAGS[n % 3]}\n" for n, word in enumerate(text.split())), "\n"])
    for text in TEXTS
)
CHOICES = "".join(
    json.dumps({"guid": f"c{n}", "context": text, "start": "so", "endings": TEXTS[:3], "label": n % 3}) + "\n"
    for n, text in enumerate(TEXTS)
)

SQUAD = {"task.doc_stride": 3, "task.max_query_length": 4, "task.max_seq_len": 14, "task.n_best": 3,
         "task.max_answer_length": 2}  # fmt: skip
RUNS: dict[str, tuple[str, str, str, dict[str, Any]]] = {  # config, file and its content, settings
    "text": ("text", "a.csv", rows("key", "body", "stars"), {
        "task.text": "body", "task.label": "stars", "task.max_seq_len": 7}),
    "regression": ("text", "a.csv", rows("id", "text", "score"), {
        "task.regression": True, "task.label": "score"}),
    "cola": ("glue:cola", "dev.tsv", "".join(f"x\t{n % 2}\t\t{text}\n" for n, text in enumerate(TEXTS)), {}),
    "mrpc": ("glue:mrpc", "dev.tsv",
             rows("#1 ID", "#1 String", "#2 String", "Quality", separator="\t", pair=True),
             {}),
    "choice": ("swag", "dev.jsonl", CHOICES, {"task.max_seq_len": 20}),
    "ner": ("ner", "mine.conll", TAGGED, {"task.document_context": True, "task.max_seq_len": 9}),
    "squad": ("squad", "a.json", questions(12), SQUAD),
    "squad2": ("squad:2.0", "a.json", questions(7), SQUAD),
}  # fmt: skip


LONG = ("regression", "squad")  # which others cover in part


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in RUNS])
def run(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file, the workdir `run` that was trained and scored on it, its export and the import of that."""
    name, file, content, settings = RUNS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    (folder / file).write_text(content)
    given = {"task.train": file, "task.dev": file}
    if name.startswith("glue"):
        (folder / "train.tsv").write_text(content)
        given = {}
    values = {"init": checkpoint, "data.path": folder, "num_epochs": 2, "global_batch_size": 4,
              "optimizer.learning_rate": 1e-2, "optimizer.bias_correction": True, "task.max_seq_len": 24,
              **given, **settings}  # fmt: skip
    finetune(load_config(f"finetune/{name}", values, kind=FinetuneConfig), str(folder / "run"))
    huggingface.export(open_checkpoint(str(folder / "run")), str(folder / "export"))
    import_checkpoint(str(folder / "export"), str(folder / "import"))
    return folder / file


def test_workdir_export_and_import_have_one_record(run: Path):
    tasks = [task_of(open_model_of(str(run.parent / name))) for name in ("run", "export", "import")]
    assert tasks[0] == tasks[1] == tasks[2]
    default = type(tasks[0])(name=tasks[0].name, kind=tasks[0].kind)
    assert tasks[0].record().keys() == default.record().keys()  # the record has every field
    assert type(tasks[0]).from_record(json.loads(json.dumps(tasks[0].record()))) == tasks[0]


def test_workdir_export_and_import_score_as_the_run_did(run: Path):
    result = json.loads((run.parent / "run" / "result.json").read_text())
    for name in ("run", "export", "import"):
        found = evaluate_finetuned(open_model_of(str(run.parent / name)), str(run))
        assert found["scores"][run.name] == pytest.approx(result["scores"]["dev"], abs=1e-4)
        assert [found.get(key) for key in ("task", "main_metric")] == [
            result.get(key) for key in ("task", "main_metric")
        ]  # fmt: skip


def test_workdir_export_and_import_predict_the_file_of_training(run: Path):
    said = []
    for name in ("run", "export", "import"):
        output = run.parent / f"{name}.jsonl"
        count = predict(open_model_of(str(run.parent / name)), str(run), str(output), strict=True)
        assert count == len(TEXTS)
        said.append([json.loads(line) for line in output.read_text().splitlines()])
    assert said[0] == said[1] == said[2]
    keys = ("prediction", "probabilities", "probability")
    assert len({json.dumps([row.get(key) for key in keys]) for row in said[0]}) > 1  # which something could change


def test_the_threshold_of_no_answer_is_that_of_the_run(run: Path):
    task = task_of(open_checkpoint(str(run.parent / "run")))
    if task.name != "squad/2.0":
        assert getattr(task, "null_threshold", None) is None
        return
    scores = json.loads((run.parent / "run" / "result.json").read_text())["scores"]["dev"]
    assert task.null_threshold == pytest.approx(scores["best_f1_thresh"], abs=2e-4)


@pytest.mark.parametrize(
    ("record", "problem"), [({"texts": 5}, r"texts=5: .*tuple"), ({"max_seq_len": "9"}, r"max_seq_len='9': .*int")]
)
def test_values_of_another_type_are_refused(record: dict, problem: str):
    with pytest.raises(InputError, match=problem):
        KINDS["text"].from_record({"name": "text", **record})


def test_names_of_labels_are_those_of_transformers(run: Path, tmp_path: Path):
    """A folder that `transformers` saved again with other names, of an export."""
    config = json.loads((run.parent / "export" / "config.json").read_text())
    if "id2label" not in config or config.get("problem_type") == "regression":
        return
    names = {number: f"B-{name}" for number, name in config["id2label"].items()}
    for path in (run.parent / "export").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": names}))
    assert list(names.values()) in task_of(open_model_of(str(tmp_path))).record().values()
