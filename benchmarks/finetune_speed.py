"""Compares fine-tuning with `transformers`' Trainer in torch: the same task, model and settings on the same CPU.

    BERT_JAX_DATA=FOLDER python benchmarks/finetune_speed.py [--task mrpc] [--model bert_mini] [--repeats 6]
        [--tasks 640x3 3200x6]

FOLDER holds glue/ as distributed, and vocab/bert-base-uncased-vocab.txt. A model of random parameters is exported to
Hugging Face's format, and all sides train it on the same rows: `bert_jax`'s finetune; the Trainer with batches of
random rows (its default); and the Trainer with batches of rows of similar length. The Trainer pads a batch to its
longest row. `bert_jax` sorts by length within 64 batches. Optimizer, schedule, dropout and batch size are the paper's
on every side; each side has its own output layer. Sides run in turn, each in its own process. None evaluates, and none
saves before its last step. `bert_jax` runs twice: cold, with an empty cache of programs, and warm, with that of the
cold run. A task is a number of examples and of epochs: 640x3 is 60 steps, 3200x6 is 600.

Examples per second exclude the first epoch, in which bert_jax compiles a step for each length of rows and torch warms
up. The total time includes it: from the start of the process to the end of the last step. CPU time is comparable beside
other work, unlike wall time, but only under `taskset -c 0`, because torch's threads spend CPU time waiting for each
other. Ratios are medians of the ratios of the rounds. Every run is a line of JSON on stderr. The losses are means over
the first and the last epoch: if they differ between sides, the sides have not trained the same way.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from record import Record, add_json_argument

CORES = len(os.sched_getaffinity(0))
BATCH = 32
MAX_SEQ_LEN = 128
LEARNING_RATE = 5e-5
WARMUP = 0.1  # of all steps
WEIGHT_DECAY, EPS, CLIP = 0.01, 1e-6, 1.0
ROWS, CHECKPOINT, EXPORTED, TASK = "rows.jsonl", "checkpoint", "huggingface", "task.json"


def prepare(folder: Path, data: Path, task_name: str, model: str, examples: int) -> dict:
    """Writes the rows and the model, as a checkpoint and as a folder of `transformers`; returns the task's settings."""
    import jax
    from etils import epath

    from bert_jax.config import load_config
    from bert_jax.finetuning.task import BadRows
    from bert_jax.finetuning.tasks.text import GlueTask
    from bert_jax.interop import huggingface
    from bert_jax.model import BertConfig, initialize, parameter_count
    from bert_jax.model.bert import HEADS
    from bert_jax.sections import to_dict
    from bert_jax.text.conversion import convert_vocabulary
    from bert_jax.training.checkpoints import open_checkpoint, save_parameters

    task = GlueTask.of(task_name)
    rows = task.read(task.find(str(data / "glue"), {})["train"], BadRows(), split="train")[:examples]
    with (folder / ROWS).open("w") as file:
        for row in rows:
            pair = {} if row.text_b is None else {"text_pair": row.text_b}
            label = row.label if task.regression else task.classes.index(row.label)
            file.write(json.dumps({"text": row.text_a, **pair, "label": label}) + "\n")
    tokenizer = convert_vocabulary(str(data / "vocab" / "bert-base-uncased-vocab.txt"))
    config = BertConfig(**{**to_dict(load_config(model).model), "vocab_size": tokenizer.vocab_size})
    _, parameters = jax.jit(lambda: initialize(config, jax.random.key(0)))()
    save_parameters(
        epath.Path(folder / CHECKPOINT), parameters, bert_config=config, tokenizer=tokenizer, heads=HEADS
    )  # fmt: skip
    huggingface.export(open_checkpoint(str(folder / CHECKPOINT)), str(folder / EXPORTED))
    return {
        "examples": len(rows), "is_pair": rows[0].text_b is not None, "labels": len(task.classes) or 1,
        "regression": task.regression, "parameters": parameter_count(config),
    }  # fmt: skip


class Clock:
    """Records the time at the end of each step, and the CPU time of the process until then."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.cpu: list[float] = []

    def update(self, n: float = 1) -> None:
        self.steps.append(time.monotonic())
        self.cpu.append(time.process_time())

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None: ...
    def unpause(self) -> None: ...

    def close(self) -> None: ...


def finetune_bert_jax(folder: Path, task: dict, epochs: int) -> dict:
    from bert_jax.runtime.interpreter import tune_malloc

    tune_malloc()  # as the command does, before JAX has threads
    import jax

    from bert_jax.config import FinetuneConfig, load_config
    from bert_jax.finetuning.finetune import finetune

    compiled: list[float] = []

    def on_event(event: str, seconds: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    epoch = -(-task["examples"] // BATCH)
    settings = {
        "init": folder / CHECKPOINT, "task.train": folder / ROWS, "task.text": "text", "task.label": "label",
        "task.text_pair": "text_pair" if task["is_pair"] else "", "task.regression": task["regression"],
        "task.max_seq_len": MAX_SEQ_LEN, "num_epochs": epochs, "global_batch_size": BATCH, "log_every_steps": epoch,
        "checkpoint.every_steps": 10**9, "optimizer.learning_rate": LEARNING_RATE, "optimizer.eps": EPS,
        "optimizer.warmup_proportion": WARMUP, "optimizer.weight_decay": WEIGHT_DECAY,
        "optimizer.grad_clip_norm": CLIP, "optimizer.bias_correction": True,  # as torch's AdamW has it
        "data.sort_window": 64,
    }  # fmt: skip
    config = load_config("finetune/text", [(key, str(value)) for key, value in settings.items()], kind=FinetuneConfig)
    clock = Clock()
    with tempfile.TemporaryDirectory() as workdir:
        finetune(config, workdir, bars=lambda **_: clock)
        rows = [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": clock.steps[-1] - clock.steps[epoch - 1],
        "tokens": rows[-1]["tokens_seen"] - rows[0]["tokens_seen"], "losses": [row["loss"] for row in rows],
        "clock": clock, "compiled": len(compiled), "compile_seconds": sum(compiled),
    }  # fmt: skip


def finetune_trainer(folder: Path, task: dict, epochs: int, sampling: str = "random") -> dict:
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    torch.set_num_threads(CORES)
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / EXPORTED)
    model = AutoModelForSequenceClassification.from_pretrained(folder / EXPORTED, num_labels=task["labels"])
    rows = [json.loads(line) for line in (folder / ROWS).read_text().splitlines()]
    texts = [[row[name] for row in rows] for name in ("text", "text_pair") if name in rows[0]]
    encoded = tokenizer(*texts, truncation=True, max_length=MAX_SEQ_LEN)
    label = float if task["regression"] else int
    examples = [
        {**{name: values[i] for name, values in encoded.items()}, "labels": label(row["label"])}
        for i, row in enumerate(rows)
    ]
    pad, tokens = DataCollatorWithPadding(tokenizer), []

    def collate(features: list[dict]) -> dict:
        batch = pad(features)
        tokens.append(batch["input_ids"].numel())
        return batch

    clock = Clock()

    class OnStep(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            clock.update()

    epoch = -(-len(rows) // BATCH)
    total, warmup = epochs * epoch, int(WARMUP * epochs * epoch)

    class PaperTrainer(Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> object:
            """Decays from step 0, as BERT's schedule does; the Trainer's own decays from the end of warm-up."""

            def share_of_peak(step: int) -> float:
                return step / warmup if step < warmup else 1 - step / total

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, share_of_peak)
            return self.lr_scheduler

    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output, num_train_epochs=epochs, per_device_train_batch_size=BATCH, learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY, adam_epsilon=EPS, max_grad_norm=CLIP, train_sampling_strategy=sampling,
            use_cpu=True, save_strategy="no", logging_strategy="epoch", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = PaperTrainer(model, arguments, data_collator=collate, train_dataset=examples, callbacks=[OnStep()])
        trainer.train()
    return {
        "seconds": clock.steps[-1] - clock.steps[epoch - 1], "tokens": sum(tokens[epoch:]),
        "real_tokens_a_row": sum(map(len, encoded["input_ids"])) / len(rows),
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row], "clock": clock,
    }  # fmt: skip


def finetune_trainer_by_length(folder: Path, task: dict, epochs: int) -> dict:
    return finetune_trainer(folder, task, epochs, "group_by_length")


SIDES: dict[str, tuple[Callable[[Path, dict, int], dict], str]] = {
    "cold": (finetune_bert_jax, "bert-jax finetune, cold cache"),
    "warm": (finetune_bert_jax, "bert-jax finetune, warm cache"),
    "trainer": (finetune_trainer, "Trainer"),
    "trainer_by_length": (finetune_trainer_by_length, "Trainer, rows grouped by length"),
}

MEASURES = (
    "bert_jax/finetuning", "bert_jax/model", "bert_jax/parallel", "bert_jax/text/sequences.py", "bert_jax/training",
)  # fmt: skip
FIGURES = {  # of a run: their headings
    "examples_per_second": "examples per second",
    "cpu_ms_an_example": "CPU ms per example",
    "first_step_after": "first step after, s",
    "whole": "total, s",
    "whole_cpu": "CPU time, s",
}


def with_range(name: str, form: str) -> str:
    """Returns the format of a median with its minimum and maximum."""
    return f"{{{name}_median:{form}}} ({{{name}_minimum:{form}}}-{{{name}_maximum:{form}}})"


COLUMNS = {
    "steps": "{steps}",
    "side": "{side}",
    "runs": "{runs}",
    **{heading: with_range(name, ",.1f") for name, heading in FIGURES.items()},
    "tokens per row": "{tokens_a_row:.1f}",
    "loss": "{first_loss:.3f} to {last_loss:.3f}",
}
RATIOS = {
    "steps": "{steps}",
    "cache": "{ours}",
    "bert-jax, times": "{side}",
    "speed": with_range("speed", ".2f"),
    "by CPU time": with_range("cpu", ".2f"),
    "by total time": with_range("whole", ".2f"),
    "by total CPU time": with_range("whole_cpu", ".2f"),
}


def run_side(side: str, folder: Path, epochs: int, began: float) -> dict:
    """Runs a side and returns its measurements; `began` is the start time of its process."""
    task = json.loads((folder / TASK).read_text())
    result = SIDES[side][0](folder, task, epochs)
    clock, losses = result.pop("clock"), result.pop("losses")
    epoch, rows = -(-task["examples"] // BATCH), (epochs - 1) * task["examples"]
    assert len(losses) == epochs, losses
    assert len(clock.steps) == epochs * epoch, len(clock.steps)
    return {
        "side": side, "examples_per_second": rows / result.pop("seconds"),
        "cpu_ms_an_example": 1000 * (clock.cpu[-1] - clock.cpu[epoch - 1]) / rows,
        "first_step_after": clock.steps[0] - began, "whole": clock.steps[-1] - began, "whole_cpu": clock.cpu[-1],
        "tokens_a_row": result.pop("tokens") / rows, "first_loss": losses[0], "last_loss": losses[-1], **result,
    }  # fmt: skip


def start_side(side: str, folder: Path, epochs: int, cache: Path) -> dict:
    """Runs a side in its own process, with the cache of programs in `cache`."""
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        "BERT_JAX_CACHE": str(cache),
    }  # fmt: skip
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    began = time.monotonic()  # the machine's clock, shared by all processes
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder), "--epochs", str(epochs)]
    done = subprocess.run(
        [*command, "--began", str(began)], capture_output=True, text=True, check=False, env=environment
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.strip().split("\n")[-1])


def summarize(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "minimum": min(values), "maximum": max(values)}


def make_row(steps: int, side: str, runs: list[dict]) -> dict:
    """Returns the row of a side, for `COLUMNS`: medians of its runs, minima and maxima."""
    row: dict = {"steps": steps, "side": SIDES[side][1], "runs": len(runs)}
    for name in FIGURES:
        row |= {f"{name}_{kind}": value for kind, value in summarize([run[name] for run in runs]).items()}
    means = ("tokens_a_row", "real_tokens_a_row", "first_loss", "last_loss")
    return row | {name: statistics.median(run[name] for run in runs) for name in means if name in runs[0]}


def make_ratios(steps: int, cache: str, side: str, runs: dict[str, list[dict]]) -> dict:
    """Returns the row that compares bert_jax's runs with those of another side, run by run, for `RATIOS`."""
    pairs = list(zip(runs[cache], runs[side], strict=True))
    row: dict = {"steps": steps, "ours": cache, "side": SIDES[side][1]}
    ratios = {
        "speed": [one["examples_per_second"] / other["examples_per_second"] for one, other in pairs],
        "cpu": [other["cpu_ms_an_example"] / one["cpu_ms_an_example"] for one, other in pairs],
        "whole": [other["whole"] / one["whole"] for one, other in pairs],
        "whole_cpu": [other["whole_cpu"] / one["whole_cpu"] for one, other in pairs],
    }
    for name, values in ratios.items():
        row |= {f"{name}_{kind}": value for kind, value in summarize(values).items()}
    return row


def report(record: Record, runs: dict[int, dict[str, list[dict]]], setting: dict) -> None:
    """Records and prints the figures of all sides, by the number of steps."""
    ours, peers = ("cold", "warm"), [side for side in SIDES if side.startswith("trainer")]
    rows = [make_row(steps, side, found[side]) for steps, found in runs.items() for side in SIDES]
    record.set_table("sides", COLUMNS, rows)
    ratios = [
        make_ratios(steps, cache, side, found) for steps, found in runs.items() for cache in ours for side in peers
    ]
    record.set_table("ratios", RATIOS, ratios)
    cold = [run for found in runs.values() for run in found["cold"]]
    compile_seconds = summarize([run["compile_seconds"] for run in cold])
    record.set_values(
        **setting, programs=statistics.median(run["compiled"] for run in cold),
        **{f"compile_seconds_{kind}": value for kind, value in compile_seconds.items()},
    )  # fmt: skip
    print(record.render("sides"), record.render("ratios"), sep="\n\n")
    print("\n" + json.dumps(record.content["values"], indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("BERT_JAX_DATA"), help="default: $BERT_JAX_DATA")
    parser.add_argument("--task", default="mrpc", help="GLUE task: mrpc, stsb, sst2, ...")
    parser.add_argument("--model", default="bert_mini", help="config of pre-training with the model's sizes")
    parser.add_argument(
        "--tasks", nargs="+", default=["640x3", "3200x6"], metavar="EXAMPLESxEPOCHS",
        help="examples from the start of the file, and epochs: at least 2, because the first is not timed",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    add_json_argument(parser, "finetune_speed")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_side(options.side, options.folder, options.epochs, options.began)))
        return
    if options.data is None:
        parser.error("--data is missing; set it, or BERT_JAX_DATA, to the folder of glue/ and vocab/")
    sizes = [tuple(map(int, task.split("x"))) for task in options.tasks]
    if any(len(size) != 2 or size[1] < 2 for size in sizes):
        parser.error(f"--tasks={' '.join(options.tasks)}: expected EXAMPLESxEPOCHS with at least 2 epochs")
    record = Record(options.json, MEASURES, packages=("torch", "transformers"))
    runs: dict[int, dict[str, list[dict]]] = {}
    setting: dict = {"task": options.task, "model": options.model, "batch_size": BATCH}
    with tempfile.TemporaryDirectory() as temporary:
        for examples, epochs in sizes:
            folder = Path(temporary, str(examples))
            folder.mkdir()
            task = prepare(folder, options.data, options.task, options.model, examples)
            (folder / TASK).write_text(json.dumps(task))
            setting["parameters"] = task["parameters"]
            found = runs.setdefault(epochs * -(-task["examples"] // BATCH), {side: [] for side in SIDES})
            for number in range(options.repeats):
                round_of_sides = {}
                for side in SIDES:
                    round_of_sides[side] = start_side(side, folder, epochs, folder / f"cache-{number}")
                    print(json.dumps(round_of_sides[side]), file=sys.stderr, flush=True)
                for side, run in round_of_sides.items():
                    found[side].append(run)
                report(record, runs, setting)  # after every round: a run that is stopped keeps what it has


if __name__ == "__main__":
    main()
