"""Runs of the whole loop; those that are killed are processes of their own."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support import child_processes, helpers, sources
from support.devices import all_devices, one_device  # noqa: F401
from support.runs import SETTINGS, assert_same_run, train, train_command, train_until

from bert_jax.config import FinetuneConfig, load_config
from bert_jax.errors import BertJaxError, InputError
from bert_jax.model.bert import Parameters
from bert_jax.runtime.interpreter import SIGNALS
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.pretrain import pretrain


@pytest.fixture(scope="module")
def straight(dataset_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    result = train(dataset_dir, workdir)
    assert result.returncode == 0, result.stderr
    return workdir


def test_run_learns_and_writes_its_files(straight: Path):
    rows = helpers.rows(straight)
    training = [row for row in rows if "split" not in row]
    evaluations = [row for row in rows if row.get("split") == "eval"]
    assert [row["step"] for row in training] == list(range(10, 121, 10))
    assert [row["step"] for row in evaluations] == [40, 80, 120]
    assert {
        "loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "learning_rate", "grad_norm",
        "nonfinite_steps", "examples_per_second", "tokens_per_second",
    } <= set(training[-1])  # fmt: skip
    assert evaluations[-1]["mlm_loss"] < evaluations[-1]["unigram_loss"] - 0.1
    assert evaluations[-1]["mlm_loss"] < evaluations[0]["mlm_loss"]
    assert len({row["unigram_loss"] for row in evaluations}) == 1
    assert {path.name for path in (straight / "checkpoints").iterdir()} == {"96", "120"}
    assert json.loads((straight / "config.json").read_text())["total_steps"] == 120
    assert list((straight / "tensorboard").glob("events.*"))
    found = open_checkpoint(str(straight))
    assert found.bert_config.hidden_size == 32
    assert found.bert_config.vocab_size == found.tokenizer.vocab_size
    assert open_checkpoint(str(straight / "checkpoints" / "96")).path.name == "96"


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_run_killed_at_random_moments_ends_as_one_that_was_not(kills: int, dataset_dir: Path, tmp_path: Path):
    """It saves every second step, so that most of them are during a save."""
    settings = {
        "total_steps": 20 * (kills + 1), "checkpoint.every_steps": 2, "eval_batches": 0, "eval_every_steps": 0,
        "log_every_steps": 3,
    }  # fmt: skip
    random = np.random.default_rng(kills)
    for number in range(kills):
        killed = train_until(1, dataset_dir, tmp_path / "run", signal.SIGKILL, saved=20 * number + 2, **settings,
                             delay=random.uniform(0, 0.2))  # fmt: skip
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert helpers.kept_steps(tmp_path / "run")[-1] < settings["total_steps"]
    for workdir in (tmp_path / "run", tmp_path / "plain"):
        done = train(dataset_dir, workdir, **settings)
        assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "run", tmp_path / "plain")


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=() if number is signal.SIGTERM else pytest.mark.long) for number in SIGNALS],
)
def test_a_stop_signal_saves_and_exits_with_75(
    number: signal.Signals, straight: Path, dataset_dir: Path, tmp_path: Path
):
    stopped = train_until(40, dataset_dir, tmp_path, number)
    assert stopped.returncode == 75, stopped.stderr
    saved = helpers.kept_steps(tmp_path)[-1]
    assert re.search(rf"{number.name}: .*step {saved}\b", stopped.stderr)
    assert saved >= 40
    assert "Traceback" not in stopped.stderr
    assert train(dataset_dir, tmp_path).returncode == 0
    assert_same_run(tmp_path, straight)


@pytest.mark.long
def test_a_signal_before_the_first_step_ends_the_run(dataset_dir: Path, tmp_path: Path):
    process = child_processes.start(
        train_command(dataset_dir, tmp_path), env=helpers.child_environment(), stderr=subprocess.PIPE, text=True
    )
    log = []
    for line in process.stderr:
        log.append(line)
        if "Opening the datasets" in line:
            process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 75, log
    assert "SIGTERM: stopped before step 1; rerun the same command" in log[-1]
    assert not helpers.kept_steps(tmp_path)
    assert helpers.run_cli("inspect", f"--workdir={tmp_path}", "--step=2").returncode == 0
    assert train(dataset_dir, tmp_path).returncode == 0


def test_a_full_disk_is_one_line(dataset_dir: Path, tmp_path: Path):
    settings = {**SETTINGS, "data.path": dataset_dir}
    done = helpers.on_small_disk(
        tmp_path, 300, "pretrain", "--config=bert_tiny", "--workdir", tmp_path / "disk" / "run",
        *helpers.flags(settings),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "disk" in done.stderr.strip().split("\n")[-1]


def test_without_an_eval_split_there_is_no_evaluation(corpus_file: Path, vocabulary_file: Path, tmp_path: Path, caplog):
    helpers.prepare_dataset(corpus_file, vocabulary_file, tmp_path / "data", eval_fraction=0.0)
    config = helpers.small_config(tmp_path / "data", total_steps=2, optimizer__warmup_steps=1)
    with caplog.at_level("INFO"):
        assert pretrain(config, str(tmp_path / "run")) == {}
    assert "eval_batches=0" in caplog.text
    assert f"{tmp_path / 'run' / 'checkpoints' / '2'}" in caplog.text
    assert all("split" not in row for row in helpers.rows(tmp_path / "run"))


def test_a_finished_run_has_nothing_to_do(straight: Path, dataset_dir: Path):
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in straight.rglob("*") if path.name != "lock"}

    before = times()
    result = train(dataset_dir, straight)
    assert result.returncode == 0, result.stderr
    assert "step 120 of 120" in result.stderr
    assert times() == before


@pytest.mark.long
def test_resume_falls_back_to_the_newest_intact_step(straight: Path, dataset_dir: Path, tmp_path: Path):
    shutil.copytree(straight, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "120" / "optimizer" / "d")
    (tmp_path / "run" / "checkpoints" / "999").mkdir()
    overrides = {key.replace(".", "__"): value for key, value in {**SETTINGS, "total_steps": 130}.items()}
    pretrain(helpers.small_config(dataset_dir, **overrides), str(tmp_path / "run"))
    there = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert there == ["120", "120.damaged", "130", "999.damaged"]
    steps = [row["step"] for row in helpers.train_rows(tmp_path / "run")]
    assert steps == list(range(10, 131, 10))


@pytest.mark.long
@pytest.mark.usefixtures("all_devices")
def test_gradient_accumulation_is_inferred_and_may_change_on_resume(dataset_dir: Path, tmp_path: Path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    pretrain(helpers.small_config(dataset_dir), str(whole))
    settings = {"gradient_accumulation": -1, "max_rows_per_device": 1, "data__seq_len": 64}
    pretrain(helpers.small_config(dataset_dir, **settings), str(cut))
    shutil.rmtree(cut / "checkpoints" / "8")  # steps 5 to 8 again, on half of the devices' microbatches
    pretrain(helpers.small_config(dataset_dir, **{**settings, "max_rows_per_device": 2}), str(cut))
    for a, b in zip(helpers.rows(whole), helpers.rows(cut), strict=True):
        assert a["step"] == b["step"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    assert '"gradient_accumulation": -1' in (cut / "config.json").read_text()


@pytest.mark.parametrize(
    ("name", "other"), [("muon", "adamw"), pytest.param("stable_adamw", "muon", marks=pytest.mark.long)]
)
def test_a_run_resumes_with_its_optimizer_and_not_from_other_moments(
    name: str, other: str, dataset_dir: Path, tmp_path: Path
):
    def run(folder: str, steps: int, optimizer: str = name) -> Parameters:
        keys = {"total_steps": steps, "optimizer__name": optimizer, "eval_batches": 0, "mesh__zero1": True}
        pretrain(helpers.small_config(dataset_dir, optimizer__schedule="constant", **keys), str(tmp_path / folder))
        return open_checkpoint(str(tmp_path / folder)).load_parameters()

    run("resumed", 4)
    message = rf"optimizer\.name={other}: .*resumed .*set optimizer\.name={name}, .*init="
    with pytest.raises(InputError, match=message):
        run("resumed", 6, other)
    sources.assert_same_parameters(run("resumed", 6), run("straight", 6))
    if other == "muon":
        run("resumed", 7, "adamw")  # whose state has the same arrays


@pytest.mark.long
def test_too_many_nonfinite_steps_end_the_run_with_a_checkpoint(dataset_dir: Path, tmp_path: Path):
    config = helpers.small_config(
        dataset_dir, optimizer__learning_rate=1e30, total_steps=12, max_nonfinite_steps=3, checkpoint__every_steps=12,
        eval_every_steps=0,
    )  # fmt: skip
    with pytest.raises(BertJaxError, match=r"max_nonfinite_steps=3\b") as raised:
        pretrain(config, str(tmp_path))
    assert raised.value.exit_status == 1
    assert helpers.kept_steps(tmp_path)
    rows = helpers.rows(tmp_path)
    assert rows[-1]["step"] == helpers.kept_steps(tmp_path)[-1]
    assert rows[-1]["nonfinite_streak"] >= 3
    assert rows[-1]["nonfinite_steps"] == rows[-1]["nonfinite_streak"] == rows[-1]["step"] - 1
    # The state stayed what it was, so that the run may resume from it with a lower rate.
    better = helpers.small_config(dataset_dir, total_steps=12, max_nonfinite_steps=3, eval_every_steps=0)
    assert pretrain(better, str(tmp_path))["mlm_loss"] < 5


def test_empty_workdir_and_another_config_are_refused(dataset_dir: Path):
    with pytest.raises(InputError, match=r"^workdir="):
        pretrain(helpers.small_config(dataset_dir), "")
    with pytest.raises(InputError, match="config=FinetuneConfig: expected a value of type PretrainConfig"):
        pretrain(load_config("finetune/text", kind=FinetuneConfig), "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective__nsp": False}, "objective.nsp True -> False"),
        ({"total_steps": 119}, r"\b120\b.*total_steps=119"),
        ({"model__hidden_size": 64}, "model.hidden_size 32 -> 64"),
        ({"seed": 1}, "seed 0 -> 1"),
    ],
)
def test_a_workdir_holds_one_run(changes, message, straight: Path, dataset_dir: Path):
    overrides = {key.replace(".", "__"): value for key, value in SETTINGS.items()}
    with pytest.raises(InputError, match=message):
        pretrain(helpers.small_config(dataset_dir, **{**overrides, **changes}), str(straight))


def test_another_dataset_or_vocabulary_is_refused(
    straight: Path, corpus_file: Path, vocabulary: list[str], tmp_path: Path
):
    overrides = {key.replace(".", "__"): value for key, value in SETTINGS.items()}
    swapped = [*vocabulary[:-2], vocabulary[-1], vocabulary[-2]]
    helpers.write_tokenizer(tmp_path / "tokenizer.json", swapped)
    helpers.prepare_dataset(corpus_file, tmp_path / "tokenizer.json", tmp_path / "other_vocabulary")
    with pytest.raises(InputError, match=f"{tmp_path / 'other_vocabulary'} .*{straight}"):
        pretrain(helpers.small_config(tmp_path / "other_vocabulary", **overrides), str(straight))
    helpers.write_tokenizer(tmp_path / "tokenizer.json", vocabulary)
    helpers.prepare_dataset(corpus_file, tmp_path / "tokenizer.json", tmp_path / "other_data", dupe_factor=2)
    with pytest.raises(InputError, match=f"{straight}: .*{tmp_path / 'other_data'}"):
        pretrain(helpers.small_config(tmp_path / "other_data", **overrides), str(straight))


@pytest.mark.usefixtures("all_devices")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data__path": "/nowhere"}, "/nowhere"),
        ({"data__path": ""}, r"^data\.path=:"),
        ({"model__max_position_embeddings": 32}, r"\b64\b.*model\.max_position_embeddings=32"),
        ({"model__vocab_size": 30522}, r"model\.vocab_size=30522\b.*-1"),
        ({"model__num_attention_heads": 5}, r"model\.hidden_size=32\b.*num_attention_heads=5"),
        ({"global_batch_size": 20}, r"global_batch_size=20\b"),
        ({"gradient_accumulation": 3}, r"gradient_accumulation=3\b.*\b24\b"),
        ({"mesh__data": 3}, r"mesh\.data=3\b.*: .*\b3\b.*\b8\b"),
        ({"mesh__data": -1, "mesh__fsdp": 3}, r"mesh\.fsdp=3\b.*: 8\b.*\b3\b"),
        ({"mesh__data": -1, "mesh__fsdp": -1}, r"mesh\.data=-1 x mesh\.fsdp=-1\b"),
        ({"mesh__data": 0, "mesh__tensor": 8}, r"mesh\.data=0\b.*: .*\b1\b"),
        ({"mesh__data": 1, "mesh__tensor": 8}, r"model\.num_attention_heads=4\b.*mesh\.tensor=8"),
        ({"objective__lm": "ltr"}, r"objective\.lm=ltr\b.*objective\.nsp=False"),
        ({"objective__lm": "clm"}, r"objective\.lm=clm: .*mlm, ltr"),
        ({"total_steps": 3_000_000_000}, r"total_steps=3000000000: must be in \[1, 2\*\*31\)"),
        ({"dtype": "float16"}, r"dtype=float16: .*auto, float32, bfloat16"),
        ({"remat": "some"}, "remat=some: .*none, attention, dots, full"),
        ({"total_steps": 0}, r"total_steps=0: .*\b1\b"),
        ({"objective__mask_token": 0.9}, r"objective\.mask_token.*0\.9"),
        ({"seed": -1}, "seed=-1: "),
        ({"gradient_accumulation": 0}, "gradient_accumulation=0: .*-1"),
        ({"gradient_accumulation": -1}, r"max_rows_per_device=\d+: .*gradient_accumulation=-1"),
        ({"gradient_reduce_dtype": "float16"}, "gradient_reduce_dtype=float16: .*float32, bfloat16"),
        ({"data__seq_len": 128}, r"\b64\b.*data\.seq_len=128\b.*--seq_len 128"),
        ({"optimizer__learning_rate": "nan"}, r"optimizer\.learning_rate=nan: "),
        ({"optimizer__warmup_steps": 8}, r"optimizer\.warmup_steps=8: .*total_steps=8\b"),
        ({"profile__steps": "9:10"}, r"profile\.steps=9:10: step 9 .*\b8 steps"),
        ({"stall_exit": True, "stall_minutes": 0}, r"stall_exit=True: .*stall_minutes"),
        ({"model__type_vocab_size": 1}, r"model\.type_vocab_size=1: "),
        ({"global_batch_size": 10**12}, r"global_batch_size=1000000000000: .*\b1048576"),
        ({"data__max_predictions": 10**9}, r"data\.max_predictions=1000000000: .*\b64\b"),
        ({"data__max_predictions": 65, "data__packing": True}, r"data\.max_predictions=65"),
        ({"data__max_predictions": 0}, r"data\.max_predictions=0"),
        ({"model__hidden_size": 10**7, "model__num_attention_heads": 1}, r"GiB.*model\.hidden_size"),
    ],
)
def test_invalid_config_is_refused_before_any_work(overrides, message, dataset_dir: Path, tmp_path: Path):
    with pytest.raises(InputError, match=message):
        pretrain(helpers.small_config(dataset_dir, **overrides), str(tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints").exists()


# --- Runs whose number of steps changes --------------------------------------------------------------------------


def test_log_of_a_prolonged_run_names_the_rate_before_and_after(
    dataset_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "bert_jax")
    few = {"eval_batches": 0, "log_every_steps": 1}
    pretrain(helpers.small_config(dataset_dir, total_steps=8, optimizer__warmup_steps=2, **few), str(tmp_path))
    caplog.clear()
    pretrain(helpers.small_config(dataset_dir, total_steps=16, optimizer__warmup_steps=2, **few), str(tmp_path))
    rates = [row["learning_rate"] for row in helpers.train_rows(tmp_path)]
    assert rates[7:] == pytest.approx([1e-2 / 8, *(1e-2 * (16 - step) / 16 for step in range(8, 16))])
    messages = [record.getMessage() for record in caplog.records]
    assert "Learning rate: 0.00125 at step 8, 0.005 at step 9" in messages


def test_resumed_run_of_the_same_length_logs_no_changed_rate(
    dataset_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    few = {"eval_batches": 0, "checkpoint__every_steps": 3, "checkpoint__keep": 9}
    pretrain(helpers.small_config(dataset_dir, **few), str(tmp_path))
    shutil.rmtree(tmp_path / "checkpoints" / "8")
    pretrain(helpers.small_config(dataset_dir, **few), str(tmp_path))
    assert not any("Learning rate: " in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("every", [0, 4])
def test_run_whose_steps_are_lowered_to_its_newest_checkpoint_is_evaluated_there_once(
    every: int, dataset_dir: Path, tmp_path: Path
):
    pretrain(helpers.small_config(dataset_dir, eval_every_steps=every, checkpoint__keep=9), str(tmp_path))
    shutil.rmtree(tmp_path / "checkpoints" / "8")
    lowered = helpers.small_config(dataset_dir, total_steps=4, eval_every_steps=every)
    scores = pretrain(lowered, str(tmp_path))
    assert [row["step"] for row in helpers.train_rows(tmp_path)] == [1, 2, 3, 4]
    (row,) = helpers.eval_rows(tmp_path)
    assert (row["step"], row["mlm_loss"]) == (4, scores.get("mlm_loss", row["mlm_loss"]))
    assert bool(scores) == (every == 0)
    assert pretrain(lowered, str(tmp_path)) == {}
