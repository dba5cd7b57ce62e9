"""Multi-process runs on this machine, connected as on several hosts."""

import subprocess
from pathlib import Path

from support import child_processes, helpers

DEVICES = 4
SETTINGS = {
    "model.num_hidden_layers": 1, "model.hidden_size": 32, "model.num_attention_heads": 4,
    "model.intermediate_size": 64, "model.max_position_embeddings": 64, "data.max_predictions": 10,
    "model.hidden_dropout_prob": 0.1,
    "total_steps": 6, "global_batch_size": 16, "gradient_accumulation": 2, "log_every_steps": 1, "eval_every_steps": 3,
    "eval_batches": -1, "checkpoint.every_steps": 3, "optimizer.warmup_steps": 2, "optimizer.learning_rate": 5e-3,
}  # fmt: skip


def start(
    count: int, dataset: Path | list[Path], workdir: Path | list[Path], **overrides: object
) -> list[subprocess.Popen]:
    """Runs training in `count` processes with four devices in total; datasets and workdirs may differ by process."""
    datasets = dataset if isinstance(dataset, list) else [dataset] * count
    workdirs = workdir if isinstance(workdir, list) else [workdir] * count
    overrides = {**SETTINGS, **{key.replace("__", "."): value for key, value in overrides.items()}}
    commands = [
        helpers.command("pretrain", "--config=bert_tiny", f"--workdir={place}", *helpers.flags(overrides),
                        f"--config.data.path={data}")
        for data, place in zip(datasets, workdirs, strict=True)
    ]  # fmt: skip
    return start_commands(commands)


def start_commands(commands: list[list[str]], **variables: str) -> list[subprocess.Popen]:
    """Starts the commands as the processes of one run, in order, with four devices in total and more variables."""
    together = {**variables, "JAX_COORDINATOR_ADDRESS": helpers.free_address(), "JAX_NUM_PROCESSES": str(len(commands))}
    return [
        child_processes.start(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=helpers.child_environment(DEVICES // len(commands), **together, JAX_PROCESS_ID=str(number)),
        )
        for number, command in enumerate(commands)
    ]  # fmt: skip


def finish(processes: list[subprocess.Popen], expect: int = 0) -> list[str]:
    """Waits for the processes and returns the stderr of each."""
    written = [process.communicate(timeout=280)[1] for process in processes]
    assert [process.returncode for process in processes] == [expect] * len(processes), "\n".join(written)
    return written
