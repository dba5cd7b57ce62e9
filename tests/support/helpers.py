"""Synthetic language with a grammar that a small model can learn, and helpers shared by tests."""

import os
import random
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from etils import epath
from support import child_processes, preparing

from bert_jax.config import FinetuneConfig, PretrainConfig, load_config
from bert_jax.parallel.mesh import make_mesh
from bert_jax.text.tokenizer import SPECIAL_TOKENS, read_tokenizer
from bert_jax.text.wordpiece import wordpiece_tokenizer
from bert_jax.tracking.metrics import read_metrics
from bert_jax.training import phases
from bert_jax.training.checkpoints import complete_steps
from bert_jax.training.phases import Phase

REPOSITORY = Path(__file__).parents[2]
STRICT = "BERT_JAX_TEST_STRICT_DEVICES"
"""Environment variable that makes `command` run on strict devices."""

TOPICS = {
    "sea": ["ship", "wave", "storm", "sailor", "harbour", "island", "gull", "anchor"],
    "wood": ["tree", "leaf", "fox", "path", "moss", "hunter", "cabin", "river"],
    "town": ["street", "baker", "market", "clock", "tower", "child", "window", "lamp"],
    "night": ["moon", "star", "owl", "shadow", "dream", "silence", "candle", "ghost"],
}
VERBS = ["sees", "follows", "finds", "leaves", "hears", "fears"]
SMALL_WORDS = ["the", "a", "near", "and", "of", "old", "little", "dark", "."]


QUICK_COMPILATION = "--xla_backend_optimization_level=0"
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # later versions removed the flag
    QUICK_COMPILATION += " --xla_cpu_use_fusion_emitters=false"  # a third of the time


def make_vocabulary() -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*SMALL_WORDS, *VERBS, *(word for topic in TOPICS.values() for word in topic)]
    pieces = [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters), *words]
    return list(dict.fromkeys(pieces))


def make_corpus(documents: int, seed: int = 0, sentences: tuple[int, int] = (2, 20)) -> str:
    """Returns documents of `sentences` sentences on one topic each; one sentence a line, blank lines in between."""
    rng = random.Random(seed)
    result = []
    for _ in range(documents):
        words = TOPICS[rng.choice(list(TOPICS))]
        lines = []
        for _ in range(rng.randint(*sentences)):
            first, second = rng.sample(words, 2)
            middle = rng.choice(["", f" near the {rng.choice(words)}", f" and the little {rng.choice(words)}"])
            lines.append(f"the {first} {rng.choice(VERBS)} {rng.choice(['the', 'a', 'the old'])} {second}{middle} .")
        result.append("\n".join(lines))
    return "\n\n".join(result) + "\n"


def write_tokenizer(path: Path, pieces: Sequence[str], *, lowercase: bool = True) -> None:
    """Writes the `tokenizer.json` of a WordPiece vocabulary."""
    path.write_bytes(wordpiece_tokenizer(pieces, lowercase).file_bytes())


def prepare_dataset(corpus: Path, vocabulary: Path, output: Path, **options: Any) -> None:
    preparing.run(corpus, read_tokenizer(vocabulary), output, **options)


def small_config(dataset: Path, kind: type[PretrainConfig] = PretrainConfig, **overrides: object) -> Any:
    """Returns the config of a run of seconds; in `overrides`, double underscores stand for dots."""
    chosen = {
        "data__path": dataset, "model__num_hidden_layers": 1, "model__hidden_size": 32, "model__num_attention_heads": 4,
        "model__intermediate_size": 64, "model__max_position_embeddings": 64, "data__max_predictions": 10,
        "total_steps": 8, "global_batch_size": 16, "log_every_steps": 1, "eval_every_steps": 4, "eval_batches": 2,
        "checkpoint__every_steps": 4, "optimizer__warmup_steps": 2, "optimizer__learning_rate": 1e-2,
        "tracking__samples": 0,  # a program less to compile
        **overrides,
    }  # fmt: skip
    return load_config("bert_tiny", {key.replace("__", "."): value for key, value in chosen.items()}, kind=kind)


def open_phases(config: PretrainConfig) -> list[Phase]:
    """Opens the phases of a run on this process's devices."""
    return phases.open_phases(config, make_mesh(config.mesh))


def flags(config_overrides: dict[str, object]) -> list[str]:
    return [f"--config.{key}={value}" for key, value in config_overrides.items()]


def run_cli(
    *arguments: object, timeout: float = 240, devices: int = 1, **environment: str
) -> subprocess.CompletedProcess:
    """Runs `bert-jax ARGUMENTS` in a child process."""
    return child_processes.run(command(*arguments), env=child_environment(devices, **environment), timeout=timeout)


def run_python(code: str, *arguments: object, **environment: str) -> str:
    """Returns the output of code that has to succeed in a child process."""
    words = [sys.executable, "-c", code, *map(str, arguments)]
    done = child_processes.run(words, env=child_environment(**environment), timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(*arguments: object) -> list[str]:
    module = "support.strict_device" if os.environ.get(STRICT) else "bert_jax.cli"
    return [sys.executable, "-m", module, *map(str, arguments)]


def child_environment(devices: int = 1, **environment: str) -> dict[str, str]:
    """Returns the environment of a process that runs JAX on `devices` simulated CPU devices and compiles quickly.

    Tests run small programs once: compiling without optimization and remembering the result saves most of their time.
    """
    cache = REPOSITORY / ".pytest_cache" / "xla"
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH")])),
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",  # of torch, whose threads would spin while other workers have the cores
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK_COMPILATION}",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **environment,
    }


def finetune_config(name: str, settings: Mapping[str, object], **overrides: object) -> FinetuneConfig:
    """Returns a packaged config of fine-tuning with settings by key and overrides, whose `__` stands for a dot."""
    values = {**settings, **{key.replace("__", "."): value for key, value in overrides.items()}}
    return load_config(f"finetune/{name}", [(key, str(value)) for key, value in values.items()], kind=FinetuneConfig)


def error_lines(stderr: str) -> list[str]:
    """Returns the lines of a command's stderr without those of its log."""
    return [line for line in stderr.splitlines() if not re.match(r"\d{4}-\d\d-\d\d [\d:]{8} (INFO|WARNING) ", line)]


def free_address() -> str:
    """Returns HOST:PORT of an unused port on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def on_small_disk(tmp_path: Path, kilobytes: int, *arguments: object) -> subprocess.CompletedProcess:
    """Runs a command with a small disk at `tmp_path/disk`, and prints the files on it afterwards."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={kilobytes}k none {shlex.quote(str(disk))}"
    if (
        sys.platform != "linux"
        or subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("a small disk cannot be mounted here")
    words = shlex.join(command(*arguments))
    list_files = f"find {shlex.quote(str(disk))} -type f"
    script = f"{mount} && {{ {words}; status=$?; {list_files}; exit $status; }}"
    return child_processes.run(["unshare", "-rm", "sh", "-c", script], env=child_environment(), timeout=120)


def rows(workdir: Path | str) -> list[dict[str, Any]]:
    """Returns all rows of the metrics of a run."""
    return read_metrics(epath.Path(workdir))


def train_rows(workdir: Path | str) -> list[dict[str, Any]]:
    return [row for row in rows(workdir) if "split" not in row]


def eval_rows(workdir: Path | str) -> list[dict[str, Any]]:
    return [row for row in rows(workdir) if row.get("split") == "eval"]


def kept_steps(workdir: Path | str) -> list[int]:
    """Returns the complete steps of a workdir, in ascending order."""
    return sorted(int(step.name) for step in complete_steps(epath.Path(workdir)))
