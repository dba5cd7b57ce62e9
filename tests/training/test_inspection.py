"""`bert-jax inspect --workdir RUN --step N`: batch and losses are those that the step of the run trained on."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support import helpers
from support.devices import all_devices, one_device  # noqa: F401

from bert_jax import cli
from bert_jax.config import FinetuneConfig, PretrainConfig, load_config
from bert_jax.errors import InputError
from bert_jax.sections import from_mapping, to_dict
from bert_jax.training import inspection
from bert_jax.training.inspection import inspect_step, render_step
from bert_jax.training.pretrain import pretrain

WITHOUT_DROPOUT = {
    "model__hidden_dropout_prob": 0.0, "model__attention_probs_dropout_prob": 0.0, "eval_batches": 0,
    "checkpoint__every_steps": 1, "checkpoint__milestones": (0,),
}  # fmt: skip
LTR = {"objective__lm": "ltr", "objective__nsp": False}


def run(dataset: Path | str, workdir: Path, **settings: object) -> dict[int, dict]:
    """Trains, and returns the logged row of each step."""
    pretrain(helpers.small_config(dataset, **{**WITHOUT_DROPOUT, **settings}), str(workdir))
    return {row["step"]: row for row in helpers.train_rows(workdir)}


@pytest.fixture(scope="module")
def workdir(dataset_dir: Path, other_dir: Path, tmp_path_factory: pytest.TempPathFactory, one_device: None) -> Path:  # noqa: F811
    """A run of everything that decides a batch: phases with a batch ramp, a mixture, microbatches, skipped steps."""
    folder = tmp_path_factory.mktemp("inspected") / "run"
    both = {"data.path": f"{dataset_dir},{other_dir}", "global_batch_size": 32}
    run(
        dataset_dir, folder, phases=({"steps": 3}, {**both, "steps": 3, "objective.mask_rate": 0.3}), total_steps=6,
        gradient_accumulation=2, data__skip_steps="2:4,5:5", checkpoint__keep=2, checkpoint__milestones=(0, 1),
    )  # fmt: skip
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {}, {**LTR, "data__packing": True},
        pytest.param({"data__packing": True, "gradient_accumulation": 2}, marks=pytest.mark.long),
        pytest.param(LTR, marks=pytest.mark.long),
        {"objective__whole_word": True, "objective__nsp": False, "objective__mask_rate": 0.4},
        {"objective__nsp": False, "phases": ({"steps": 1, "objective.lm": "ltr"}, {"steps": 1})},
        {
            "model__position_embedding_type": "rotary",
            "phases": ({"steps": 1, "model.global_rope_theta": 10.0}, {"steps": 1}),
        },
    ],
    ids=["mlm", "packed ltr", "packed", "ltr", "whole words", "ltr, then mlm", "other rotary angles"],
)  # fmt: skip
def test_losses_are_those_that_training_logged(settings: dict, dataset_dir: Path, tmp_path: Path):
    logged = run(dataset_dir, tmp_path / "run", **settings, total_steps=2, optimizer__warmup_steps=1)
    for step in (1, 2):
        report = inspect_step(str(tmp_path / "run"), step, samples=10_000)
        assert report["parameters_of_step"] == step - 1
        names = {name for name in logged[step] if name.endswith(("loss", "accuracy"))}
        assert names == {name for name in report if name.endswith(("loss", "accuracy"))}
        for name in names:
            assert report[name] == pytest.approx(logged[step][name], rel=2e-6), name
        samples, lm = report["samples"], "ltr" if "ltr_loss" in names else "mlm"
        assert len(samples) == report["examples"]
        predictions = [made for sample in samples for made in sample["predictions"]]
        assert np.mean([made["loss"] for made in predictions]) == pytest.approx(report[f"{lm}_loss"], rel=1e-5)
        correct = np.mean([made["best"] == made["target"] for made in predictions])
        assert correct == pytest.approx(report[f"{lm}_accuracy"], rel=1e-5)
        for sample in samples:
            own = np.mean([made["loss"] for made in sample["predictions"]])
            assert sample[f"{lm}_loss"] == pytest.approx(own, rel=1e-5)
            assert sample["loss"] == pytest.approx(sample[f"{lm}_loss"] + sample.get("nsp_loss", 0), rel=1e-5)
        assert [sample["loss"] for sample in samples] == sorted((sample["loss"] for sample in samples), reverse=True)


def test_losses_where_positions_repeat(dataset_dir: Path, corpus_file: Path, vocabulary_file: Path, tmp_path: Path):
    helpers.prepare_dataset(corpus_file, vocabulary_file, tmp_path / "short", seq_len=32)
    phases = ({"steps": 1, "data.path": str(tmp_path / "short")}, {"steps": 2})
    settings = {"phases": phases, "total_steps": 3, "optimizer__warmup_steps": 1, "optimizer__learning_rate": 0.1}
    logged = run(dataset_dir, tmp_path / "run", repeat_positions=True, **settings)
    for step in (2, 3):
        assert inspect_step(str(tmp_path / "run"), step)["loss"] == pytest.approx(logged[step]["loss"], rel=2e-6)


def test_the_batch_is_that_of_the_step_in_any_phase(workdir: Path, monkeypatch: pytest.MonkeyPatch):
    logged = {row["step"]: row for row in helpers.train_rows(workdir)}
    assert helpers.kept_steps(workdir) == [0, 1, 5, 6]
    monkeypatch.setattr(inspection, "MOST_ROWS", 5)  # the last part is of fewer rows
    for step in (1, 2, 6):
        report = inspect_step(str(workdir), step)
        assert (report["parameters_of_step"], report["rows"]) == (step - 1, 16 if step < 4 else 32)
        for name in ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy"):
            assert report[name] == pytest.approx(logged[step][name], rel=2e-6)
    assert inspect_step(str(workdir), 4)["parameters_of_step"] == 1
    assert report["microbatches"] == 2
    assert len({sample["data"] for sample in inspect_step(str(workdir), 6, samples=99)["samples"]}) == 2


@pytest.mark.usefixtures("all_devices")
def test_a_run_of_one_device_is_inspected_on_eight(workdir: Path):
    logged = {row["step"]: row for row in helpers.train_rows(workdir)}
    assert inspect_step(str(workdir), 6)["loss"] == pytest.approx(logged[6]["loss"], rel=2e-6)


def test_samples_are_the_rows_of_the_batch(workdir: Path):
    *_, phase = helpers.open_phases(from_mapping(PretrainConfig, json.loads((workdir / "config.json").read_text())))
    batch, tokenizer = phase.train_loader.batch(4), phase.datasets[0].tokenizer
    samples = inspect_step(str(workdir), 5, samples=99)["samples"]
    assert sorted(sample["row"] for sample in samples) == list(range(32))
    for sample in samples:
        row = {name: entry[sample["row"]] for name, entry in batch.items()}
        real = int((row["sequence_ids"] > 0).sum())
        pieces = [tokenizer.vocab[token] for token in row["input_ids"][:real]]
        shown = sample["text"].split(" ")
        assert [piece.strip("{}").split(">")[-1] if piece[0] == "{" else piece for piece in shown] == pieces
        used = row["masked_weights"] > 0
        positions, targets = row["masked_positions"][used].tolist(), row["masked_ids"][used].tolist()
        expected = [(at, tokenizer.vocab[target], pieces[at]) for at, target in zip(positions, targets, strict=True)]
        assert [(made["position"], made["target"], made["input"]) for made in sample["predictions"]] == expected
        assert sample["random_next"] == row["next_sentence_labels"][0]
        source = next(found for found in phase.datasets if str(found.folder) == sample["data"])
        ids = source.instances("train", np.array([sample["instance"]]))["input_ids"][0]
        restored = [{at: target for at, target, _ in expected}.get(at, piece) for at, piece in enumerate(pieces)]
        assert [tokenizer.vocab[token] for token in ids[:real]] == restored


def test_without_a_checkpoint_before_the_step_there_are_no_losses(workdir: Path, tmp_path: Path):
    shutil.copytree(workdir, tmp_path / "run")
    for step in (0, 1, 5):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    report = inspect_step(str(tmp_path / "run"), 5)
    assert report["parameters_of_step"] is None
    assert "loss" not in report
    assert [sample["row"] for sample in report["samples"]] == [0, 1, 2]
    assert [sample["text"] for sample in report["samples"]] == [
        sample["text"] for row in range(3) for sample in inspect_step(str(workdir), 5, samples=99)["samples"]
        if sample["row"] == row
    ]  # fmt: skip
    text = "\n".join(render_step(report))
    assert "No losses" in text
    assert "[MASK]" in text


def test_a_kernel_and_a_mesh_of_the_run_are_not_needed(workdir: Path, tmp_path: Path):
    """A run of 8 TPUs is inspected on a CPU."""
    shutil.copytree(workdir, tmp_path / "run")
    config = json.loads((workdir / "config.json").read_text())
    config |= {"attention": "pallas", "mesh": {**config["mesh"], "fsdp": 2}, "gradient_accumulation": 1}
    config["model"] |= {"hidden_size": 128, "num_attention_heads": 2}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    record = json.loads((workdir / "provenance.json").read_text())
    record["runs"][-1]["devices"] = {"platform": "tpu", "kind": "TPU v5 lite", "count": 8, "processes": 2}
    (tmp_path / "run" / "provenance.json").write_text(json.dumps(record))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert inspect_step(str(tmp_path / "run"), 5)["microbatches"] == 1


# --- Command ---------------------------------------------------------------------------------------------------------


def test_command(workdir: Path, capsys: pytest.CaptureFixture):
    assert cli.main(["inspect", f"--workdir={workdir}", "--step=6", "--samples=1"]) == 0
    first, second, _, place, text, *predictions = capsys.readouterr().out.rstrip().split("\n")
    assert f"{workdir}: step 6 of 6: 32 examples in 32 rows of 64 tokens, in 2 microbatches" in first
    assert second.startswith("With the parameters of step 5, without dropout: ")
    assert " loss=" in second
    assert f"of {workdir.parent}" not in place
    assert "mlm_loss=" in place
    assert text.count("{") == len(predictions)
    assert cli.main(["inspect", f"--workdir={workdir}", "--step=6", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["samples"]) == 3
    assert predictions[0].split()[1] == report["samples"][0]["predictions"][0]["target"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workdir=RUN", "--step=0"], "--step=0"), (["--workdir=RUN", "--step=7"], "total_steps=6"),
        (["--workdir=none", "--step=1"], "--workdir="), (["--workdir=FINETUNED", "--step=1"], "--workdir="),
        *(
            (words, "expected either a dataset, or --workdir with --step")
            for words in (
                ["data", "--workdir=RUN", "--step=1"], [], ["data", "--step=1"], ["--workdir=RUN"], ["--step=1"]
            )
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line(
    words: list[str], message: str, workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    config = to_dict(load_config("finetune/text", kind=FinetuneConfig))
    (tmp_path / "config.json").write_text(json.dumps(config))
    places = {"RUN": str(workdir), "FINETUNED": str(tmp_path)}
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    assert cli.main(["inspect", *words]) == 2
    (line,) = helpers.error_lines(capsys.readouterr().err.rstrip())
    assert message in line


def test_another_dataset_is_refused(workdir: Path, dataset_dir: Path, other_dir: Path, tmp_path: Path):
    shutil.copytree(workdir, tmp_path / "run")
    config = json.loads((workdir / "config.json").read_text())
    config["data"]["path"] = str(other_dir)
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="trained on another dataset"):
        inspect_step(str(tmp_path / "run"), 1)
