"""The commands that are killed, with what they read."""

import importlib.util
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from processes import bert_jax

Words = list[object]

MODEL = {
    "model.num_hidden_layers": 1, "model.hidden_size": 128, "model.num_attention_heads": 2,
    "model.intermediate_size": 256, "model.max_position_embeddings": 64,
}  # fmt: skip
TRAINING = {
    **MODEL, "total_steps": 200, "global_batch_size": 16, "log_every_steps": 5, "eval_every_steps": 50,
    "eval_batches": 1, "checkpoint.every_steps": 20, "checkpoint.keep": 2, "optimizer.warmup_steps": 10,
    "tracking.samples": 0,
}  # fmt: skip
TASK = {
    "task.train": "train.csv", "task.dev": "dev.csv", "task.max_seq_len": 32, "num_epochs": 2, "global_batch_size": 16,
    "checkpoint.every_steps": 20,
}  # fmt: skip
VOCABULARY_SIZE = 4096  # embeddings of 2 MB: arrays above 1 MiB are saved in a way of their own


@dataclass(frozen=True)
class Case:
    """A command that is killed.

    Attributes:
      command: arguments of `bert-jax`, from the folder of inputs and the output.
      processes: processes of the run; a kill hits one of them, or all.
      resumes: the output is a workdir with checkpoints; else it is absent, or whole.
      writes_files: the output is an existing folder, in which each file is absent, or whole.
      requires: module without which the case is skipped.
    """

    command: Callable[[Path, Path], Words]
    processes: int = 1
    resumes: bool = False
    writes_files: bool = False
    requires: str = ""

    @property
    def is_possible(self) -> bool:
        return not self.requires or importlib.util.find_spec(self.requires) is not None


def _flags(settings: Mapping[str, object], more: Mapping[str, object]) -> Words:
    """Returns the flags of settings and of `more`, whose keys have dots as double underscores."""
    changed = {key.replace("__", "."): value for key, value in more.items()}
    return [f"--config.{key}={value}" for key, value in {**settings, **changed}.items()]


def _pretrain(**more: object) -> Callable[[Path, Path], Words]:
    return lambda inputs, output: [
        "pretrain", "--config=bert_tiny", f"--workdir={output}",
        *_flags({"data.path": inputs / "data64", **TRAINING}, more),
    ]  # fmt: skip


def _two_phases(inputs: Path, output: Path) -> Words:
    first = {"steps": 110, "data.path": str(inputs / "data32"), "global_batch_size": 32}
    phases = (first, {"steps": -1, "data.path": str(inputs / "data64")})
    return [*_pretrain()(inputs, output), f"--config.phases={phases}"]


def _finetune(**more: object) -> Callable[[Path, Path], Words]:
    return lambda inputs, output: [
        "finetune", "--config=finetune/text", f"--workdir={output}",
        *_flags({"init": inputs / "base", "data.path": inputs / "task", **TASK}, more),
    ]  # fmt: skip


def _prepare(*more: object) -> Callable[[Path, Path], Words]:
    return lambda inputs, output: [
        "prepare", "--input", inputs / "text", "--vocab", inputs / "tokenizer.json", "--output", output,
        "--seq_len", 64,
        "--dupe_factor", 3, "--bucket_tokens", 65_536, "--eval_fraction", 0.1, *more,
    ]  # fmt: skip


CASES = {
    "pretrain": Case(_pretrain(), resumes=True),
    "pretrain, two processes": Case(_pretrain(total_steps=40, checkpoint__every_steps=8), 2, resumes=True),
    "pretrain, two phases": Case(_two_phases, resumes=True),
    "pretrain, packed": Case(_pretrain(data__packing=True), resumes=True),
    "finetune": Case(_finetune(), resumes=True),
    "finetune, search": Case(_finetune(search__seeds=(0, 1), num_epochs=1), resumes=True),
    "vocab": Case(
        lambda inputs, output: ["vocab", "--input", inputs / "text", "--output", output / "tokenizer.json", "--size",
                                VOCABULARY_SIZE],
        writes_files=True,
    ),
    "prepare": Case(_prepare("--workers", 2)),
    "prepare, Beam": Case(_prepare("--runner", "DirectRunner"), requires="apache_beam"),
    "export": Case(lambda inputs, output: ["export", "--checkpoint", inputs / "base", "--output", output]),
    "import": Case(lambda inputs, output: ["import", "--source", inputs / "exported", "--output", output]),
    "features": Case(
        lambda inputs, output: ["features", "--checkpoint", inputs / "base", "--input", inputs / "lines.txt",
                                "--output", output / "features.jsonl", "--layers", "all"],
        writes_files=True,
    ),
    "predict": Case(
        lambda inputs, output: ["predict", "--checkpoint", inputs / "classifier", "--input",
                                inputs / "task" / "many.csv", "--output", output / "predictions.jsonl"],
        writes_files=True,
    ),
}  # fmt: skip


def make_inputs(folder: Path) -> None:
    """Makes what the commands read."""
    folder.mkdir()
    _write_texts(folder)
    bert_jax("vocab", "--input", folder / "text", "--output", folder / "tokenizer.json", "--size", VOCABULARY_SIZE)
    for length in (32, 64):
        bert_jax("prepare", "--input", folder / "text", "--vocab", folder / "tokenizer.json", "--output",
                 folder / f"data{length}", "--seq_len", length, "--eval_fraction", 0.1)  # fmt: skip
    bert_jax(*_pretrain(total_steps=20)(folder, folder / "base"))
    bert_jax("export", "--checkpoint", folder / "base", "--output", folder / "exported")
    bert_jax(*_finetune(num_epochs=1)(folder, folder / "classifier"))


def _write_texts(folder: Path) -> None:
    """Writes lines, documents and rows of a task from a few hundred made-up words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(2, 8))) for _ in range(6000)]
    sentence = lambda: " ".join(rng.choices(words, k=rng.randint(4, 24))).capitalize() + "."  # noqa: E731
    (folder / "task").mkdir(exist_ok=True)
    for name, count in (("train", 640), ("dev", 64), ("many", 6000)):
        rows = [f"{sentence()},{rng.choice(('yes', 'no'))}" for _ in range(count)]
        (folder / "task" / f"{name}.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    (folder / "lines.txt").write_text("".join(sentence() + "\n" for _ in range(1500)))
    (folder / "text").mkdir(exist_ok=True)
    for number in range(8):
        documents = [
            json.dumps({"text": "\n".join(sentence() for _ in range(rng.randint(5, 40)))}) + "\n" for _ in range(300)
        ]
        (folder / "text" / f"{number}.jsonl").write_text("".join(documents))
