"""Programs of the commands: the benchmark lists all that they compile, and each compiles for TPUs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import tpu_programs
from support import helpers
from support.compilations import logged_compilations
from support.devices import one_device  # noqa: F401

import bert_jax
from bert_jax.ahead_of_time.compiled_step import open_target
from bert_jax.cli import main
from bert_jax.config import load_config
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.parallel.mesh import make_mesh

MODEL = BertConfig(
    vocab_size=1000, hidden_size=128, num_hidden_layers=4, num_attention_heads=2, intermediate_size=256,
    max_position_embeddings=64,
)  # fmt: skip


def programs(devices: Any, fsdp: int = 1) -> dict[str, Callable[[], Any]]:
    """Lists the programs of a small model."""
    sizes = {"global_batch_size": 4 * len(devices), "data.max_predictions": 8, "mesh.fsdp": fsdp}
    config = load_config("bert_tiny", [(key, str(value)) for key, value in sizes.items()])
    return tpu_programs.programs(make_mesh(config.mesh, devices), config, MODEL, 64, 4 * len(devices))


def run(command: str, *arguments: object, **overrides: object) -> None:
    """Runs a command in this process; overrides have dots as double underscores."""
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    assert main([command, *map(str, arguments), *helpers.flags(values)]) == 0


@pytest.mark.long
def test_all_programs_that_the_commands_compile_are_listed(
    dataset_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):  # fmt: skip
    listed = {tpu_programs.name_of(tpu_programs.lower(found)) for found in programs(jax.devices()[:1]).values()}
    (tmp_path / "texts.txt").write_text("the ship .\nan owl .\n")
    (tmp_path / "train.csv").write_text("text,label\n" + "the ship sees .,a\nthe owl hears .,b\n" * 16)
    first, tuned = f"{tmp_path}/first", f"{tmp_path}/tuned"
    steps = {"global_batch_size": 16, "data__max_predictions": 10, "optimizer__warmup_steps": 0, "eval_batches": 1}
    small = {
        **steps, "data__path": dataset_dir, "model__hidden_size": 32, "model__num_attention_heads": 2,
        "model__intermediate_size": 64, "model__max_position_embeddings": 64,
    }  # fmt: skip
    with logged_compilations() as found:
        run("pretrain", "--config=bert_tiny", f"--workdir={first}", **small, total_steps=1)
        run(
            "pretrain", "--config=continue", f"--workdir={tmp_path}/continued", **steps, total_steps=1, init=first,
            data__path=dataset_dir,
        )  # fmt: skip
        run("evaluate", f"--checkpoint={first}", f"--data={dataset_dir}")
        run(
            "features", f"--checkpoint={first}", f"--input={tmp_path}/texts.txt", f"--output={tmp_path}/tokens.npz",
            "--layers=-1",
        )  # fmt: skip
        run("fill-mask", f"--checkpoint={first}", "the [MASK] sees .")
        run("export", f"--checkpoint={first}", f"--output={tmp_path}/exported")
        run("import", f"--source={tmp_path}/exported", f"--output={tmp_path}/imported")
        run(
            "finetune", "--config=finetune/text", f"--workdir={tuned}", init=first, data__path=tmp_path, num_epochs=1,
            task__train="train.csv", task__dev="train.csv", task__max_seq_len=32,
        )  # fmt: skip
        run("predict", f"--checkpoint={tuned}", f"--input={tmp_path}/train.csv", f"--output={tmp_path}/predicted.jsonl")
        run("evaluate", f"--checkpoint={tuned}", f"--data={tmp_path}/train.csv")
        for model in (bert_jax.load(first), bert_jax.load(tuned)):
            model.embed("the ship .")
            model.encode("the ship .")
        model.predict("the ship .")
    assert {"train_step", "make", "evaluation_sums", "run_model"} <= {name for name, _ in found} <= listed


@pytest.mark.long
@pytest.mark.parametrize(("topology", "fsdp"), [("v5e:2x2", 2), ("v5e:4x4", 4), ("v4:2x2x2", 1), ("v6e:2x2", 2)])
def test_every_program_compiles(topology: str, fsdp: int):
    try:
        target = open_target(topology)
    except InputError as error:
        pytest.skip(str(error))
    for name, program in programs(target.devices, fsdp).items():
        peak = tpu_programs.peak_bytes(tpu_programs.lower(program))
        assert 0 < peak < target.hbm_bytes, name
