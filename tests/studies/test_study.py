"""Studies: rows that are pre-trained and fine-tuned, and the table that comes of them."""

import ast
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from support import helpers

from bert_jax.config import PretrainConfig, StudyConfig, load_config
from bert_jax.errors import InputError, Interrupted
from bert_jax.finetuning.finetune import planned_runs
from bert_jax.model import BertConfig, initialize
from bert_jax.model.bert import HEADS
from bert_jax.sections import flatten
from bert_jax.studies import study as module
from bert_jax.studies.study import Cell, Table, paired_interval, plan_rows, render, study
from bert_jax.text.wordpiece import wordpiece_tokenizer
from bert_jax.training.checkpoints import save_parameters

REPOSITORY = helpers.REPOSITORY
FOLDER = epath.Path("/not/there")
STUDIES = sorted({path.stem for path in (REPOSITORY / "configs" / "studies").glob("[a-z]*.py")} - {"default"})

CONFIG = """
from bert_jax.configs import bert_tiny
from bert_jax.configs.studies import default

LTR = {"objective.lm": "ltr", "objective.nsp": False}


def get_config():
    config = default.get_config()
    config.title = "A small table"
    config.perplexity = True
    config.pretraining = bert_tiny.get_config()
    config.pretraining.model.update(
        {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64}
    )
    config.pretraining.update({"total_steps": 4, "global_batch_size": 8, "eval_batches": 1})
    config.pretraining.optimizer.warmup_steps = 1
    config.rows = (
        {"name": "MLM & NSP", "paper": {"topic": 80.0, "perplexity": 3.99}},
        {"name": "LTR", "pretraining": LTR, "paper": {"topic": 77.5}},
        {"name": "+ BiLSTM", "pretraining": LTR, "finetuning": {"head.bilstm": 8, "num_epochs": 2}},
        {"name": "released", "checkpoint": "base"},
    )
    small = {"data.path": "topics", "task.train": "train.csv", "task.dev": "dev.csv", "task.max_seq_len": 16}
    config.tasks = (
        {
            "name": "topic", "config": "finetune/text",
            "finetuning": {**small, "num_epochs": 1, "global_batch_size": 8, "search.seeds": (0, 1)},
        },
    )
    return config
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "topics").mkdir()
    for name in ("train.csv", "dev.csv"):
        (tmp_path / "topics" / name).write_text("text,label\n" + "the ship .,sea\nthe owl .,night\n" * 8)
    (tmp_path / "small.py").write_text(CONFIG)
    return str(tmp_path / "small.py")


@pytest.fixture
def overrides(tmp_path: Path, dataset_dir: Path, checkpoint: Path) -> list[tuple[str, str]]:
    return [
        ("pretraining.data.path", str(dataset_dir)), ("task_data", str(tmp_path)), ("checkpoints.base", str(checkpoint))
    ]  # fmt: skip


def load_study(spec: str, overrides=()) -> StudyConfig:
    return load_config(spec, overrides, kind=StudyConfig)


def test_a_study_goes_on_where_it_was_stopped(spec: str, overrides, tmp_path: Path, monkeypatch):
    runs: list[str] = []
    stops = [3, 7]  # in the first pre-training and the first search of the second row

    def note(workdir: str) -> Path:
        runs.append(str(Path(workdir).relative_to(tmp_path / "run")))
        if len(runs) in stops:
            stops.remove(len(runs))
            raise Interrupted("SIGTERM")
        return Path(workdir)

    def fake_pretrain(config, workdir, **options):
        folder = note(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        loss = 2.0 if config.objective.lm == "mlm" else 3.0
        rows = [{"step": step, "split": "eval", "mlm_loss": loss} for step, loss in ((2, 9.0), (4, loss), *later)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def fake_search(config, workdir, **options):
        note(workdir)
        searched.append(config)
        results = {seed: {"dev": {"accuracy": 0.01 * len(runs) + 0.1 * seed}} for seed in config.search.seeds}
        return {"metric": "accuracy", "learning_rate": 1e-2, "results": results}

    searched: list[PretrainConfig] = []
    later: list[tuple[int, None]] = []
    monkeypatch.setattr(module, "pretrain", fake_pretrain)
    monkeypatch.setattr(module, "search", fake_search)
    config = load_study(spec, [*overrides, ("finetuning.optimizer.learning_rate", "1e-2")])
    for _ in range(2):
        with pytest.raises(Interrupted):
            study(config, str(tmp_path / "run"))
    half = json.loads((tmp_path / "run" / "table.json").read_text())
    assert [bool(row["columns"]["topic"].get("values")) for row in half["rows"]] == [True, False, False, False]
    table = study(config, str(tmp_path / "run"))
    assert runs[7:] == [
        "pretraining/mlm_nsp", "finetuning/mlm_nsp/topic", "pretraining/ltr", "finetuning/ltr/topic",
        "pretraining/ltr", "finetuning/bilstm/topic", "finetuning/released/topic",
    ]  # fmt: skip
    written = json.loads((tmp_path / "run" / "table.json").read_text())
    assert written == json.loads(json.dumps(table.as_json()))
    first, ltr, bilstm, released = written["rows"]
    assert [row["columns"]["topic"]["values"] for row in written["rows"]] == [
        pytest.approx([percent, percent + 10]) for percent in (9, 11, 13, 14)
    ]
    assert first["columns"]["perplexity"]["values"] == [pytest.approx(2.718281828**2)]
    assert ltr["columns"]["topic"]["paper"] == 77.5
    assert bilstm["columns"]["perplexity"] == ltr["columns"]["perplexity"] != first["columns"]["perplexity"]
    assert released["columns"]["perplexity"] == {"paper": None}
    of_bilstm = searched[-2]
    assert (of_bilstm.head.bilstm, of_bilstm.num_epochs, of_bilstm.optimizer.learning_rate) == (8, 2, 0.01)
    assert of_bilstm.init == str(tmp_path / "run" / "pretraining" / "ltr")
    assert of_bilstm.data.path == str(tmp_path / "topics")
    assert (tmp_path / "run" / "table.md").read_text() == render(table)
    later.append((6, None))  # not finite
    assert "values" not in study(config, str(tmp_path / "run")).as_json()["rows"][0]["columns"]["perplexity"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("only_rows", "('BERT',)"), r"only_rows.*'BERT'.*MLM & NSP, LTR, \+ BiLSTM, released"),
        (("finetuning.optimizer.rate", "1"), r"row 'MLM & NSP': task 'topic': .*optimizer\.rate"),
        (("finetuning.num_epochs", "0"), r"row 'MLM & NSP': task 'topic': num_epochs=0"),
        (("pretraining.total_step", "1"), r"pretraining\.total_step: .*pretraining\.total_steps"),
        (("task_data", "nowhere"), "task 'topic': .*nowhere/topics.*task_data="),
        (("finetuning.task.max_seq_len", "65"), r"row 'MLM & NSP': task 'topic': .*max_seq_len=65.*\b64\b"),
        (
            ("finetuning.head.features", "concat_last_four"),
            r"row 'MLM & NSP': task 'topic': .*concat_last_four.*\b4\b.*\b2\b",
        ),
        (("pretraining.data.path", ""), r"row 'MLM & NSP': pretraining\.data\.path=:"),
        (("pretraining.init", "/nowhere"), r"row 'MLM & NSP': .*/nowhere"),
        (("finetuning.mesh.data", "3"), r"row 'MLM & NSP': task 'topic': mesh"),
        (("checkpoints.base", ""), r"row 'released': .*checkpoints\.base=CHECKPOINT"),
        (("finetuning.seed", "7"), r"task 'topic': finetuning\.seed: has no effect; set finetuning\.search\.seeds"),
        (("pretraining_seeds", "(1, 2, 1)"), r"pretraining_seeds: "),
    ],
)
def test_what_cannot_be_is_said_before_any_run(override: tuple[str, str], message: str, spec: str, overrides):
    with pytest.raises(InputError, match=message):
        plan_rows(load_study(spec, [*overrides, override]), FOLDER)


def test_an_error_of_a_search_names_its_cell(spec: str, overrides, tmp_path: Path, monkeypatch):
    def refuse(*arguments, **options):
        raise InputError("workdir: holds a run with another config")

    monkeypatch.setattr(module, "pretrain", lambda *arguments, **options: {})
    monkeypatch.setattr(module, "search", refuse)
    with pytest.raises(InputError, match=r"^row 'MLM & NSP': task 'topic': workdir: holds"):
        study(load_study(spec, overrides), str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"name": "LTR"', '"name": "MLM  nsp"', "rows: .*'mlm_nsp'"),
        ('"pretraining": LTR, "paper"', '"pretrain": LTR, "paper"', r"rows\.1\.pretrain: .*pretraining"),
        ('{"objective.lm"', '{"objective.lim"', "row 'LTR': .*objective.lim.*objective.lm"),
        ('"checkpoint": "base"', '"tasks": ["QNLI"]', "row 'released': tasks.*'QNLI'.*topic"),
        ('"checkpoint": "base"', '"checkpoint": "/not/there"', "row 'released': .*/not/there"),
        ('"checkpoint": "base"', '"checkpoint": "base", "pretraining": LTR', "row 'released': .*'base'.*pretraining"),
        ('"name": "LTR"', '"name": "+"', r"rows\.1\.name=\+: "),
        (
            "config.perplexity = True", 'LTR["seed"], config.pretraining_seeds = 5, (0, 1)',
            r"row 'LTR': pretraining\.seed: has no effect; set pretraining_seeds",
        ),
        ('"total_steps": 4', '"total_steps": 4, "phases": ({"steps": 4, "objective.lm": "mlm"},)', "LTR.*: has no"),
        ('"head.bilstm": 8', '"seed": 8', "row '\\+ BiLSTM': task 'topic': finetuning.seed: has no effect"),
        ('"paper": {"topic": 77.5}', '"paper": {"topic": None}', r"rows\.1\.paper\.topic=None"),
        ('"name": "topic",', '"name": "topic", "columns": ("dev/f1",),', r"tasks\.0\.columns=\("),
        ('"name": "topic",', '"name": "topic", "scale": "x",', r"tasks\.0\.scale=x"),
        ('"config": "finetune/text",', '"columns": {"topic": "x"},', r"tasks\.0\.config="),
    ],
)  # fmt: skip
def test_a_wrong_study_is_named(old: str, new: str, message: str, spec: str, overrides):
    assert old in CONFIG
    Path(spec).write_text(CONFIG.replace(old, new))
    with pytest.raises(InputError, match=message):
        plan_rows(load_study(spec, overrides), FOLDER)


def test_a_row_takes_any_checkpoint(spec: str, overrides, checkpoint: Path):
    Path(spec).write_text(CONFIG.replace('"checkpoint": "base"', f'"checkpoint": "{checkpoint}"'))
    given = [(key, "" if key == "checkpoints.base" else value) for key, value in overrides]
    released = plan_rows(load_study(spec, given), FOLDER)[-1]
    assert (released.encoder, released.finetuning[0][1].init) == (str(checkpoint), str(checkpoint))


def test_names_of_any_script_have_folders_of_their_own(spec: str, overrides):
    Path(spec).write_text(CONFIG.replace('"name": "MLM & NSP"', '"name": "기본 모델"').replace('"LTR",', '"작은",'))
    found = [row.encoder for row in plan_rows(load_study(spec, overrides), FOLDER)[:2]]
    assert found == [str(FOLDER / "pretraining" / name) for name in ("기본_모델", "작은")]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"name": "topic",',
            '"name": "topic", "columns": {"topic": "dev/mcc"},',
            r"columns: .*'dev/mcc'.* dev/accuracy",
        ),
        ('"name": "topic",', '"name": "topic", "columns": {"topic": "test/f1"},', r"columns: .*'test/f1'"),
        ('"task.dev": "dev.csv", ', "", r"task\.dev.*a dev file"),
        ('"task.dev": "dev.csv", ', '"task.test": "dev.csv", ', r"task\.dev.*a dev file"),
        ("train.csv", "none.csv", r"none\.csv"),
        ("dev.csv", "other.csv", r"other\.csv.*label"),
    ],
)
def test_tasks_are_read_before_anything_is_trained(
    spec: str, overrides, tmp_path: Path, monkeypatch, old: str, new: str, message: str
):
    monkeypatch.setattr(module, "pretrain", lambda *args, **options: pytest.fail("trained"))
    (tmp_path / "topics" / "other.csv").write_text("text,topic\nthe owl .,night\n")
    Path(spec).write_text(CONFIG.replace(old, new))
    with pytest.raises(InputError, match=f"task 'topic': .*{message}"):
        study(load_study(spec, overrides), str(tmp_path / "run"))


def test_the_table_can_be_read():
    table = Table("T", "N", ["a", "perplexity"], ["first", "second | third"])
    table.cells = {
        ("first", "a"): Cell([1.0, 3.0], "01"), ("second | third", "a"): Cell([5.0], "0"),
        ("second | third", "perplexity"): Cell([3.994]),
    }  # fmt: skip
    table.paper = {"first": {"a": 84.4}}
    lines = ["|  | a | paper | perplexity |", "| --- | --- | --- | --- |", "| first | 2.0 ± 1.4 | 84.4 |  |",
             "| second \\| third | 5.0 |  | 3.99 |"]  # fmt: skip
    assert render(table).splitlines()[6:] == lines


def test_rows_over_seeds_are_compared_with_the_first_one():
    rows = [f"{name}, seed {seed}" for name in "ab" for seed in (0, 1)]
    table = Table("T", "", ["x"], rows, repeated={"a": rows[:2], "b": rows[2:]})
    for row, values in zip(rows, ([1.0, 3.0], [5.0, 7.0], [4.0, 4.0], [8.0, 8.0]), strict=True):
        table.cells[row, "x"] = Cell(values, "01")
    first, second = (row["columns"]["x"] for row in table.as_json()["over_seeds"])
    assert (first["mean"], first["deviation"]) == (4.0, pytest.approx(8**0.5))
    assert "difference" not in first
    # Seeds are compared in pairs: the differences are 2 and 2, though the rows' own means spread by 4.
    assert [second[key] for key in ("difference", "low", "high")] == [2.0, 2.0, 2.0]
    assert render(table).splitlines()[-2:] == ["| a | 4.0 ± 2.8 |", "| b | 6.0 ± 2.8 (2.0: 2.0 to 2.0) |"]
    del table.cells["b, seed 1", "x"]
    assert table.over_seeds()[1]["columns"] == {}


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_an_interval_has_the_true_difference_in_95_percent_of_cases(seeds: int):
    generator, inside = np.random.default_rng(seeds), 0
    for _ in range(2_000):
        theirs = generator.normal(size=seeds)
        _, low, high = paired_interval((theirs + generator.normal(1.0, 2.0, size=seeds)).tolist(), theirs.tolist())
        inside += low < 1.0 < high
    assert inside / 2_000 == pytest.approx(0.95, abs=0.015)


def test_each_seed_is_a_pre_training_of_its_own(spec: str, overrides):
    seeds = [("pretraining_seeds", "(3, 5)"), ("only_rows", "('MLM & NSP', 'released')")]
    rows = plan_rows(load_study(spec, [*overrides, *seeds]), FOLDER)
    assert [row.keys.name for row in rows] == ["MLM & NSP, seed 3", "MLM & NSP, seed 5", "released"]
    assert [row.pretraining and row.pretraining.seed for row in rows] == [3, 5, None]
    assert len({row.encoder for row in rows}) == 3


@pytest.fixture(scope="module")
def deep_encoder(vocabulary: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes an encoder with as many layers and positions as the paper's tables read."""
    folder = tmp_path_factory.mktemp("deep") / "encoder"
    tokenizer = wordpiece_tokenizer(vocabulary, lowercase=True)
    model = BertConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=512,
    )  # fmt: skip
    parameters = jax.jit(lambda key: initialize(model, key)[1])(jax.random.key(0))
    save_parameters(epath.Path(folder), parameters, bert_config=model, tokenizer=tokenizer, heads=HEADS)
    return folder


@pytest.mark.parametrize("name", STUDIES)
def test_each_study_plans_the_runs_of_its_record(name: str, tmp_path: Path, dataset_dir: Path, deep_encoder: Path):
    for folder in ("glue/MNLI", "glue/QQP", "glue/QNLI", "glue/SST-2", "glue/CoLA", "glue/STS-B", "glue/MRPC",
                   "glue/RTE", "squad", "swag", "conll2003"):  # fmt: skip
        (tmp_path / folder).mkdir(parents=True)
    values = {
        "task_data": tmp_path, "pretraining.data.path": dataset_dir, "checkpoints.base": deep_encoder,
        "checkpoints.large": deep_encoder,
    }  # fmt: skip
    config = load_study(f"studies/{name}", [(key, str(value)) for key, value in values.items()])
    rows = plan_rows(config, FOLDER)
    columns = {column for task in config.tasks for column in task.columns}
    if name.startswith("table"):
        assert config.title.startswith(f"Table {name[-1]}")
        assert {column for row in config.rows for column in row.paper} - {"perplexity"} == columns
    pretrained = {row.encoder: row.pretraining for row in rows if row.pretraining is not None}
    tokens = sum(run.total_steps * run.global_batch_size * 128 for run in pretrained.values())
    tuned = sum(len(planned_runs(cell)) for row in rows for _, cell in row.finetuning)
    docstring = ast.get_docstring(ast.parse((REPOSITORY / "configs" / "studies" / f"{name}.py").read_text())) or ""
    recorded = f"{len(pretrained)} of pre-training ({tokens:,} tokens), " if pretrained else ""
    assert f"Runs: {recorded}{tuned} of fine-tuning. Hardware, time: not yet run." in docstring


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ("no_nsp", {"objective.nsp": False, "objective.lm": "mlm"}),
        ("ltr_no_nsp", {"objective.nsp": False, "objective.lm": "ltr"}),
        ("L6_H768_A3", {"model.num_hidden_layers": 6, "model.num_attention_heads": 3, "model.intermediate_size": 3072}),
        ("mask_0_20_80", {"objective.mask_token": 0.0, "objective.keep_token": 0.2, "objective.random_token": 0.8}),
    ],
)  # fmt: skip
def test_ablations_are_configs(row: str, keys: dict):
    config, base = (dict(flatten(load_config(name))) for name in (f"ablations:{row}", "bert_base"))
    assert {key: config[key] for key in config if config[key] != base[key]} == {
        key: value for key, value in keys.items() if base[key] != value
    }  # fmt: skip
    with pytest.raises(InputError, match=r"nothing.*bert_base, no_nsp"):
        load_config("ablations:nothing")
