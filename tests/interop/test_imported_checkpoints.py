"""Tests the commands on an imported checkpoint, with all heads and with some."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from support import helpers, sources

from bert_jax import cli
from bert_jax.errors import InputError
from bert_jax.interop.importing import import_checkpoint
from bert_jax.model.bert import HEADS
from bert_jax.training.checkpoints import open_checkpoint, save_parameters
from bert_jax.training.pretrain import pretrain

HEADLESS = {"pooler": ("pooler",), "mlm": ("mlm_head",), "nsp": ("pooler", "nsp_head"), "none": ()}


def small_config(dataset: Path, **overrides: object):
    sizes = {f"model__{key}": value for key, value in sources.SIZES.items() if key != "initializer_range"}
    one_step = {"total_steps": 1, "optimizer__warmup_steps": 0, "eval_batches": 1}
    return helpers.small_config(dataset, **{**sizes, **one_step, **overrides})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> Path:
    """A folder of imported checkpoints, named by their heads."""
    folder = tmp_path_factory.mktemp("imported")
    for name, heads in {"all": HEADS, **HEADLESS}.items():
        source = sources.write_source(folder / f"{name}-hf", vocabulary, heads)
        import_checkpoint(str(source), str(folder / name))
    return folder


def run(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_case_on_the_command_line(vocabulary: list[str], tmp_path: Path, capsys: pytest.CaptureFixture):
    source = sources.write_source(tmp_path / "source", vocabulary)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    command = ("import", "--source", source, "--output")
    status, _, error = run(capsys, *command, tmp_path / "unknown")
    assert (status, "--cased or --uncased" in error, len(helpers.error_lines(error))) == (2, True, 1)
    for flag, lowercase in (("--cased", False), ("--uncased", True)):
        assert run(capsys, *command, tmp_path / flag[2:], flag)[0] == 0
        assert open_checkpoint(str(tmp_path / flag[2:])).tokenizer.lowercase is lowercase
    assert run(capsys, *command, tmp_path / "both", "--cased", "--uncased")[0] == 2


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("pooler", "mlm_head, nsp_head"),
        ("mlm", "pooler, nsp_head"),
        ("nsp", "mlm_head"),
        ("none", "pooler, mlm_head, nsp_head"),
    ],
)
def test_a_command_names_the_heads_that_it_misses(
    name: str, missing: str, checkpoints: Path, dataset_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    checkpoint = checkpoints / name
    status, out, error = run(capsys, "fill-mask", "--checkpoint", checkpoint, "the [MASK] .")
    if "mlm_head" in missing:
        assert (status, out, error.count("\n")) == (2, "", 1)
        assert "mlm_head" in error
    else:
        assert (status, len(out.strip().split("\n"))) == (0, 5)
    with pytest.raises(InputError, match=f"init.*{missing}.*init_missing_heads=True"):
        pretrain(small_config(dataset_dir, init=checkpoint), str(tmp_path / "run"))
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_evaluate_takes_the_heads_there_are(checkpoints: Path, dataset_dir: Path, capsys: pytest.CaptureFixture):
    results = {}
    for name in ("all", "mlm", "nsp"):
        status, out, _ = run(capsys, "evaluate", "--checkpoint", checkpoints / name, "--data", dataset_dir)
        assert status == 0
        results[name] = json.loads(out)
    whole = results["all"]
    for name, lacks in (("mlm", "nsp"), ("nsp", "mlm")):
        part = results[name]
        assert part.keys() == whole.keys() - {f"{lacks}_loss", f"{lacks}_accuracy"}
        assert part["unigram_loss"] == whole["unigram_loss"]
        assert part["loss"] == part[f"{name}_loss"] > 0


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != "nsp")) for name in HEADLESS])
def test_missing_heads_are_new_and_of_the_seed(
    name: str, checkpoints: Path, dataset_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    settings = {"optimizer__learning_rate": 0.0, "seed": 5}
    with caplog.at_level(logging.INFO):
        pretrain(
            small_config(dataset_dir, init=checkpoints / name, init_missing_heads=True, **settings),
            str(tmp_path / "run"),
        )
    pretrain(small_config(dataset_dir, **settings), str(tmp_path / "new"))
    before, after, new = (
        open_checkpoint(str(path)).load_parameters()
        for path in (checkpoints / name, tmp_path / "run", tmp_path / "new")
    )
    missing = [head for head in HEADS if head not in HEADLESS[name]]
    assert ", ".join(sorted(missing)) in caplog.text
    assert after.keys() == new.keys()
    sources.assert_same_parameters(after, {**new, **before})
    assert not set(missing) & before.keys()


def test_parameters_that_are_not_finite_are_refused_by_name(checkpoints, dataset_dir, tmp_path, capsys):
    found = open_checkpoint(str(checkpoints / "all"))
    parameters = found.load_parameters()
    parameters["pooler"]["bias"] = parameters["pooler"]["bias"].at[3].set(np.nan)
    save_parameters(
        epath.Path(tmp_path / "nan"), parameters,
        bert_config=found.bert_config, tokenizer=found.tokenizer, heads=found.heads,
    )  # fmt: skip
    for command in (["evaluate", "--data", dataset_dir], ["export", "--output", tmp_path / "hf"]):
        status, out, err = run(capsys, *command, "--checkpoint", tmp_path / "nan")
        (line,) = helpers.error_lines(err)
        assert (status, out, "pooler.bias" in line) == (2, "", True)
    assert not (tmp_path / "hf").exists()
