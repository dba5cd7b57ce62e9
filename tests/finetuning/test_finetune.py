"""Fine-tuning from files to scores and predictions, with a task that a small model can learn."""

import csv
import json
import random
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from support import helpers, sources
from support.runs import rows_without_times

import bert_jax
from bert_jax.cli import main
from bert_jax.config import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.finetuning.finetune import finetune
from bert_jax.training.checkpoints import open_checkpoint

SETTINGS = {
    "num_epochs": 2, "global_batch_size": 16, "log_every_steps": 5, "optimizer.learning_rate": 1e-2,
    "task.max_seq_len": 64, "task.train": "train.csv", "task.dev": "dev.jsonl", "task.test": "test.csv",
    "optimizer.bias_correction": True, "checkpoint.every_steps": 20, "checkpoint.keep": 2,
}  # fmt: skip

NUMBERS = {topic: number + 0.5 for number, topic in enumerate(helpers.TOPICS)}


def texts(count: int, seed: int) -> list[tuple[str, str]]:
    """Sentences, and what they are about. All are padded to one length: a program is compiled for each."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        topic = rng.choice(list(helpers.TOPICS))
        words = [rng.choice(helpers.TOPICS[topic]) if rng.random() < 0.4 else rng.choice(helpers.SMALL_WORDS)
                 for _ in range(rng.randint(16, 28))]  # fmt: skip
        made.append((" ".join([*words, rng.choice(helpers.TOPICS[topic])]), topic))
    return made


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    for name, count, seed in (("train.csv", 288, 0), ("test.csv", 20, 2)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "text", "label", "number"])
            for number, (text, label) in enumerate(texts(count, seed)):
                writer.writerow([f"{name}-{number}", text, label, NUMBERS[label]])
    lines = [json.dumps({"text": text, "label": label, "number": NUMBERS[label]}) for text, label in texts(40, 1)]
    (folder / "dev.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def config_of(checkpoint: Path, task: Path, **overrides: object) -> FinetuneConfig:
    return helpers.finetune_config("text", {**SETTINGS, "init": checkpoint, "data.path": task}, **overrides)


@pytest.fixture(scope="module")
def run(checkpoint: Path, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("run")
    scores = finetune(config_of(checkpoint, task), str(workdir))
    assert scores["dev"]["accuracy"] > 0.9
    return workdir


def test_a_task_is_learned_and_what_belongs_to_it_is_there(run: Path, task: Path):
    result = json.loads((run / "result.json").read_text())
    assert result["task"] == "text"
    assert result["step"] == 36
    rows = rows_without_times(run)
    assert [row["step"] for row in rows if row.get("split") == "eval"] == [18, 36]
    assert rows[-1]["dev/accuracy"] == result["scores"]["dev"]["accuracy"]
    assert rows[-2]["loss"] < rows[0]["loss"]
    assert [row["examples_seen"] for row in rows] == [16 * row["step"] for row in rows]
    assert rows[-1]["examples_seen"] == 2 * 288
    assert [row["tokens_seen"] for row in rows] == sorted(row["tokens_seen"] for row in rows)
    assert 0 < rows[-1]["tokens_seen"] <= 64 * 2 * 288
    with (task / "test.csv").open() as file:
        gold = [(row["id"], row["label"]) for row in csv.DictReader(file)]
    said = predictions_of(run, "test")
    assert [row["id"] for row in said] == [name for name, _ in gold]
    assert np.mean([row["prediction"] == label for row, (_, label) in zip(said, gold, strict=True)]) > 0.8
    found = open_checkpoint(str(run))
    assert found.task["classes"] == sorted(helpers.TOPICS)
    assert (found.task["texts"], found.task["label"]) == (["text"], "label")
    assert found.heads == ("pooler",)


def predictions_of(run: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (run / "predictions" / f"{split}.jsonl").read_text().splitlines()]


def test_predict_says_the_same_with_probabilities(run: Path, task: Path, tmp_path: Path, capsys):
    output = tmp_path / "said.jsonl"
    assert main(["predict", "--checkpoint", str(run), "--input", str(task / "test.csv"), "--output", str(output)]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"] == 20
    said = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["id"], line["prediction"]) for line in said] == [
        (line["id"], line["prediction"]) for line in predictions_of(run, "test")
    ]
    for line in said:
        assert sum(line["probabilities"].values()) == pytest.approx(1, abs=1e-4)
        assert max(line["probabilities"], key=line["probabilities"].get) == line["prediction"]


def test_evaluate_gives_the_scores_of_the_end_of_the_run(run: Path, task: Path, tmp_path: Path, capsys):
    result = json.loads((run / "result.json").read_text())
    evaluate = ["evaluate", "--checkpoint", str(run), "--data"]
    assert main([*evaluate, str(task / "dev.jsonl")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scores"] == {"dev.jsonl": result["scores"]["dev"]}
    assert found["rows"] == {"dev.jsonl": {"scored": 40, "left_out": 0}}
    assert (found["step"], found["main_metric"]) == (36, "accuracy")
    rows = (task / "dev.jsonl").read_text().splitlines()
    for bad in ('{"text": "the ship"}', '{"text": "the ship", "label": "desert"}'):
        (tmp_path / "bad.jsonl").write_text("\n".join([*rows[:3], bad]))
        assert main([*evaluate, str(tmp_path / "bad.jsonl")]) == 2
        assert f"{tmp_path / 'bad.jsonl'}:4: " in capsys.readouterr().err
    (tmp_path / "some.jsonl").write_text("\n".join([*rows, '{"text": " ", "label": "sea"}']))
    assert main([*evaluate, str(tmp_path / "some.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == {"some.jsonl": {"scored": 40, "left_out": 1}}
    assert main([*evaluate, str(task)]) == 2
    assert "--data" in capsys.readouterr().err


def test_load_gives_labels_by_name(run: Path, task: Path):
    model = bert_jax.load(str(run))
    with (task / "test.csv").open() as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    said = model.predict(texts)
    written = [line["prediction"] for line in predictions_of(run, "test")]
    assert [one["prediction"] for one in said] == written
    outputs = np.asarray(model.model(model.batch(texts[:3])))
    assert outputs.shape == (3, 4)
    assert [model.record["classes"][number] for number in outputs.argmax(axis=-1)] == written[:3]
    of_first = [said[0]["probabilities"][name] for name in model.record["classes"]]
    np.testing.assert_allclose(jax.nn.softmax(outputs[0]), of_first, atol=1e-4)
    assert model.predict(texts[0]) == said[:1]
    with pytest.raises(InputError, match=r"2 text.* 1\b.*omit the pair"):
        model.predict("the ship", "a wave")
    with pytest.raises(InputError, match="mlm_head"):
        model.fill_mask("the [MASK] .")


def test_no_pre_training_continues_in_its_workdir(run: Path, dataset_dir: Path, capsys: pytest.CaptureFixture):
    before = sorted(run.rglob("*"))
    for config, more in (("bert_tiny", ["--dry_run"]), ("bert_tiny", []), ("continue", [])):
        command = ["pretrain", f"--config={config}", f"--workdir={run}", f"--config.data.path={dataset_dir}", *more]
        assert main(command) == 2
        assert f"--workdir={run}: holds a fine-tuning run" in capsys.readouterr().err
    assert sorted(run.rglob("*")) == before


def test_a_resumed_run_ends_as_if_never_stopped(run: Path, checkpoint: Path, task: Path, tmp_path: Path, caplog):
    """Metrics that are later than its checkpoint are there again once."""
    workdir = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(workdir / "checkpoints" / "36")
    shutil.rmtree(workdir / "predictions")
    (workdir / "result.json").unlink()
    with caplog.at_level("INFO"):
        finetune(config_of(checkpoint, task), str(workdir))
    assert re.search(r"Resum\w+ from step 20\b", caplog.text)
    assert re.search(r"step 36: .*dev/accuracy \d\.\d+.* checkpoint .*checkpoints/36$", caplog.text, re.MULTILINE)
    assert rows_without_times(workdir) == rows_without_times(run)
    assert (workdir / "result.json").read_text() == (run / "result.json").read_text()
    for path in (run / "predictions").iterdir():
        assert (workdir / "predictions" / path.name).read_bytes() == path.read_bytes()


def test_a_finished_run_scores_again_and_another_is_refused(
    run: Path, checkpoint: Path, task: Path, vocabulary: list[str], tmp_path: Path
):
    before = (run / "result.json").read_text()
    finetune(config_of(checkpoint, task), str(run))
    assert (run / "result.json").read_text() == before
    with pytest.raises(InputError, match=r"workdir.*optimizer\.learning_rate 0\.01 -> 0\.1"):
        finetune(config_of(checkpoint, task, optimizer__learning_rate=0.1), str(run))
    shutil.copytree(task, tmp_path / "task")
    rows = (task / "train.csv").read_text().splitlines(keepends=True)
    (tmp_path / "task" / "train.csv").write_text("".join(rows[:-1]))
    with pytest.raises(InputError, match=r"workdir=\S+: .*data\.path"):
        finetune(config_of(checkpoint, tmp_path / "task"), str(run))
    shutil.copytree(checkpoint, tmp_path / "encoder")
    finetune(config_of(tmp_path / "encoder", task), str(run))
    assert (run / "result.json").read_text() == before
    sources.write_checkpoint(tmp_path / "another", vocabulary)
    with pytest.raises(InputError, match=r"workdir.*started from other parameters than init="):
        finetune(config_of(tmp_path / "another", task), str(run))


@pytest.mark.long
@pytest.mark.usefixtures("all_devices")
def test_a_mesh_and_microbatches_change_nothing(checkpoint: Path, task: Path, tmp_path: Path):
    config = config_of(
        checkpoint, task, mesh__data=2, mesh__fsdp=2, mesh__tensor=2, gradient_accumulation=2, num_epochs=1
    )  # fmt: skip
    finetune(config, str(tmp_path))
    one_epoch = config_of(checkpoint, task, num_epochs=1)
    finetune(one_epoch, str(tmp_path / "straight"))
    rows = [rows_without_times(workdir)[:4] for workdir in (tmp_path, tmp_path / "straight")]
    for ours, theirs in zip(*rows, strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("more", [{"head__bilstm": 8}, {"from_scratch": True}])
def test_with_a_bilstm_and_without_the_encoders_parameters(more, checkpoint: Path, task: Path, tmp_path: Path):
    scores = finetune(config_of(checkpoint, task, **more), str(tmp_path))
    assert scores["dev"]["accuracy"] > 0.6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"init": ""}, r"^init=:"),
        ({"task__train": ""}, r"^data\.path=.*task\.train=FILE"),
        ({"task__kind": "poem"}, r"task\.kind.*glue, text"),
        ({"task__max_seq_len": 65}, r"task\.max_seq_len=65.*\b64\b"),
        ({"data__sort_window": 0}, r"data\.sort_window"),
        ({"num_epochs": 0}, r"num_epochs.*\b1\b"),
        ({"head__dropout": 1.0}, r"head\.dropout.*\[0, 1\)"),
        ({"head__bilstm_layers": 2}, r"head\.bilstm_layers=2: .*head\.bilstm=768"),
        ({"optimizer__warmup_proportion": -0.1}, r"optimizer\.warmup_proportion"),
        ({"profile__steps": "999:1000"}, r"profile\.steps=999:1000: step 999 "),
        ({"optimizer__decay_power": 0.5}, r"optimizer\.decay_power=0\.5: .*optimizer\.schedule=polynomial"),
        ({"optimizer__schedule": "wsd", "optimizer__decay_steps": 0.95}, r"optimizer\.decay_steps=0\.95: "),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(overrides, message, checkpoint: Path, task: Path, tmp_path: Path):
    with pytest.raises(InputError, match=message):
        finetune(config_of(**{"checkpoint": checkpoint, "task": task, **overrides}), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_pairs_need_a_second_segment(vocabulary: list[str], tmp_path: Path):
    sources.write_checkpoint(tmp_path / "one", vocabulary, ("pooler",), type_vocab_size=1)
    (tmp_path / "train.csv").write_text("a,b,label\nthe ship,the owl,1\nthe moon,the ship,0\n")
    config = config_of(
        tmp_path / "one", tmp_path, task__train="train.csv", task__dev="", task__test="", task__text="a",
        task__text_pair="b",
    )  # fmt: skip
    with pytest.raises(InputError, match=r"task\.train: got a pair, .*type_vocab_size=1"):
        finetune(config, str(tmp_path / "run"))


@pytest.mark.parametrize("output", ["test.csv", "folder", "table.tsv"])
def test_predict_checks_the_place_of_its_output_first(output: str, run: Path, task: Path, tmp_path: Path, capsys):
    (tmp_path / "folder").mkdir()
    source = shutil.copy(task / "test.csv", tmp_path)
    assert main(["predict", "--checkpoint", str(run), "--input", source, "--output", str(tmp_path / output)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"--output={tmp_path / output}: " in line
    assert Path(source).read_bytes() == (task / "test.csv").read_bytes()
