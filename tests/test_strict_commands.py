"""Every command that computes, on devices as strict as TPUs and GPUs: one, four, and those of two processes."""

from pathlib import Path

import pytest
from support import helpers
from support.several import finish, start_commands

MESHES = {
    "one": (1, 1, {}),
    "four": (1, 4, {"mesh.data": 2, "mesh.fsdp": 2}),
    "fsdp over processes": (2, 4, {"mesh.data": 1, "mesh.fsdp": 4}),
    "tensor over processes": (2, 4, {"mesh.data": 1, "mesh.tensor": 4}),
}
"""Processes, devices in total, and config keys."""

SETTINGS = {
    "model.num_hidden_layers": 1, "model.hidden_size": 32, "model.num_attention_heads": 4,
    "model.intermediate_size": 64, "model.max_position_embeddings": 64, "data.max_predictions": 10, "total_steps": 4,
    "global_batch_size": 16, "log_every_steps": 1, "eval_every_steps": 2, "eval_batches": 1,
    "checkpoint.every_steps": 2, "optimizer.warmup_steps": 1, "eval_at_start": True,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("layout", MESHES)
def test_all_commands_on_strict_devices(
    layout: str, dataset_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(helpers.STRICT, "1")
    monkeypatch.chdir(tmp_path)
    processes, devices, mesh = MESHES[layout]

    def together(*words: str, **settings: object) -> None:
        flags = helpers.flags({key.replace("__", "."): value for key, value in settings.items()})
        commands = [helpers.command(*words, *flags)] * processes
        finish(start_commands(commands) if processes > 1 else [start_alone(commands[0])])

    def start_alone(command: list[str]) -> object:
        environment = helpers.child_environment(devices)
        return helpers.child_processes.start(command, env=environment, stderr=-1, stdout=-3, text=True)

    def alone(*words: str) -> None:
        finish([start_alone(helpers.command(*words))])

    def pretrain(workdir: str, **settings: object) -> None:
        chosen = {"data.path": dataset_dir, **SETTINGS, **mesh, **settings}
        together("pretrain", "--config=bert_tiny", f"--workdir={workdir}", *helpers.flags(chosen))

    together("check", "--workdir=.")
    pretrain("base", **{"profile.steps": "2:3"})
    pretrain("base", total_steps=6)  # resumes
    phases = "({'steps': 2}, {'steps': 2, 'objective.nsp': False})"
    pretrain("more", init="base", gradient_accumulation=2, phases=phases, **{"mesh.zero1": True})
    together("evaluate", "--checkpoint=base", f"--data={dataset_dir}")
    for name in ("train.csv", "dev.csv"):
        Path(name).write_text("text,label\n" + "the ship .,sea\nthe owl .,night\n" * 8)
    task = {
        "init": "base", "data.path": tmp_path, "task.train": "train.csv", "task.dev": "dev.csv", "num_epochs": 2,
        "task.max_seq_len": 16, "global_batch_size": 8, **mesh,
    }  # fmt: skip
    rates = {"search.learning_rates": "(1e-2, 1e-3)", "search.seeds": "(0,)"}
    for workdir, settings in {"task": {"keep_best": True}, "search": rates}.items():
        together("finetune", "--config=finetune/text", f"--workdir={workdir}", *helpers.flags({**task, **settings}))
    together("evaluate", "--checkpoint=task", "--data=dev.csv")

    Path("lines.txt").write_text("the ship .\nthe owl sees the gull .\n" * 3)
    alone("predict", "--checkpoint=task", "--input=dev.csv", "--output=predictions.jsonl")
    alone("fill-mask", "--checkpoint=base", "the [MASK] .")
    alone("features", "--checkpoint=base", "--input=lines.txt", "--layers=-1", "--output=features.npz")
    alone("export", "--checkpoint=base", "--output=hf")
    alone("export", "--checkpoint=task", "--output=hf_task")
    alone("export", "--checkpoint=base", "--format=stablehlo", "--output=program")
    alone("import", "--source=hf", "--output=imported")
    alone("evaluate", "--checkpoint=imported", f"--data={dataset_dir}")
