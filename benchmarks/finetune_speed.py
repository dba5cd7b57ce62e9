"""Compares fine-tuning with `transformers`' Trainer in torch: the same task, model and settings on the same CPU.

    BERT_JAX_DATA=FOLDER python benchmarks/finetune_speed.py [--repeats 6] [--tasks 640x3 3200x6]

FOLDER holds glue/ as distributed, and vocab/bert-base-uncased-vocab.txt. A BERT-Mini of random parameters is exported
to Hugging Face's format, and all sides train it on the same rows of MRPC: `bert_jax`'s finetune; the Trainer with
batches of random rows (its default); and the Trainer with batches of rows of similar length. The Trainer pads a batch
to its longest row. `bert_jax` sorts by length within 64 batches. Optimizer, schedule, dropout and batch size are the
paper's on every side; each side has its own output layer. Sides run in turn, each in its own process. None evaluates,
and none saves before its last step. `bert_jax` runs twice: cold, with an empty cache of programs, and warm, with that
of the cold run. A task is a number of examples and of epochs: 640x3 is 60 steps, 3200x6 is 600.

Examples per second exclude the first epoch, in which bert_jax compiles a step for each length of rows and torch warms
up. The total time includes it: from the start of the process to the end of the last step. CPU time is comparable beside
other work, unlike wall time, but only under `taskset -c 0`, because torch's threads spend CPU time waiting for each
other. Ratios are medians of the ratios of the rounds. Every run is a line of JSON on stderr. The losses are means over
the first and the last epoch: if they differ between sides, the sides have not trained the same way.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from processes import call, data_folder
from record import Record, make_parser, spread, with_range

CORES = len(os.sched_getaffinity(0))
MODEL, TASK = "bert_mini", "mrpc"
BATCH = 32
MAX_SEQ_LEN = 128
LEARNING_RATE = 5e-5
WARMUP = 0.1  # of all steps
WEIGHT_DECAY, EPS, CLIP = 0.01, 1e-6, 1.0
ROWS, CHECKPOINT, EXPORTED = "rows.jsonl", "checkpoint", "huggingface"


def prepare(folder: Path, data: Path, examples: int) -> int:
    """Writes the rows and the model, as a checkpoint and as a folder of `transformers`; returns its parameters."""
    from random_model import write_random_model

    from bert_jax.config import load_config
    from bert_jax.finetuning.task import BadRows
    from bert_jax.finetuning.tasks.text import GlueTask
    from bert_jax.model import BertConfig, parameter_count
    from bert_jax.sections import to_dict
    from bert_jax.text.conversion import convert_vocabulary

    folder.mkdir()
    task = GlueTask.of(TASK)
    rows = task.read(task.find(str(data / "glue"), {})["train"], BadRows(), split="train")[:examples]
    if len(rows) < examples:
        raise SystemExit(f"--tasks={examples}: {TASK} has {len(rows)} examples")
    with (folder / ROWS).open("w") as file:
        for row in rows:
            label = task.classes.index(row.label)
            file.write(json.dumps({"text": row.text_a, "text_pair": row.text_b, "label": label}) + "\n")
    tokenizer = convert_vocabulary(str(data / "vocab" / "bert-base-uncased-vocab.txt"))
    config = BertConfig(**{**to_dict(load_config(MODEL).model), "vocab_size": tokenizer.vocab_size})
    write_random_model(folder, config, tokenizer)
    return parameter_count(config)


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


def finetune_bert_jax(folder: Path, epoch: int, epochs: int) -> dict:
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
    settings = {
        "init": str(folder / CHECKPOINT), "task.train": str(folder / ROWS), "task.text": "text", "task.label": "label",
        "task.text_pair": "text_pair", "task.max_seq_len": MAX_SEQ_LEN, "num_epochs": epochs,
        "global_batch_size": BATCH, "log_every_steps": epoch,
        "checkpoint.every_steps": 10**9, "optimizer.learning_rate": LEARNING_RATE, "optimizer.eps": EPS,
        "optimizer.warmup_proportion": WARMUP, "optimizer.weight_decay": WEIGHT_DECAY,
        "optimizer.grad_clip_norm": CLIP, "optimizer.bias_correction": True,  # as torch's AdamW has it
        "data.sort_window": 64,
    }  # fmt: skip
    config = load_config("finetune/text", settings, kind=FinetuneConfig)
    clock = Clock()
    with tempfile.TemporaryDirectory() as workdir:
        finetune(config, workdir, bars=lambda **_: clock)
        rows = [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]
    losses, tokens = [row["loss"] for row in rows], rows[-1]["tokens_seen"] - rows[0]["tokens_seen"]
    return {"tokens": tokens, "losses": losses, "clock": clock, "compile_seconds": sum(compiled)}


def finetune_trainer(folder: Path, epoch: int, epochs: int, sampling: str = "random") -> dict:
    import torch
    import transformers as hf

    torch.set_num_threads(CORES)
    hf.set_seed(0)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder / EXPORTED)
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder / EXPORTED, num_labels=2)
    rows = [json.loads(line) for line in (folder / ROWS).read_text().splitlines()]
    texts = [[row[name] for row in rows] for name in ("text", "text_pair")]
    encoded = tokenizer(*texts, truncation=True, max_length=MAX_SEQ_LEN)
    columns = {**encoded, "labels": [row["label"] for row in rows]}
    examples = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    pad, tokens = hf.DataCollatorWithPadding(tokenizer), []

    def collate(features: list[dict]) -> dict:
        batch = pad(features)
        tokens.append(batch["input_ids"].numel())
        return batch

    clock = Clock()

    class OnStep(hf.TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            clock.update()

    total, warmup = epochs * epoch, int(WARMUP * epochs * epoch)

    class PaperTrainer(hf.Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> object:
            """Decays from step 0, as BERT's schedule does; the Trainer's own decays from the end of warm-up."""

            def share_of_peak(step: int) -> float:
                return step / warmup if step < warmup else 1 - step / total

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, share_of_peak)
            return self.lr_scheduler

    with tempfile.TemporaryDirectory() as output:
        arguments = hf.TrainingArguments(
            output, num_train_epochs=epochs, per_device_train_batch_size=BATCH, learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY, adam_epsilon=EPS, max_grad_norm=CLIP, train_sampling_strategy=sampling,
            use_cpu=True, save_strategy="no", logging_strategy="epoch", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = PaperTrainer(model, arguments, data_collator=collate, train_dataset=examples, callbacks=[OnStep()])
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"tokens": sum(tokens[epoch:]), "losses": losses, "clock": clock}


def finetune_trainer_by_length(folder: Path, epoch: int, epochs: int) -> dict:
    return finetune_trainer(folder, epoch, epochs, "group_by_length")


SIDES: dict[str, tuple[Callable[[Path, int, int], dict], str]] = {
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


def run_side(side: str, folder: str, examples: int, epochs: int, began: float) -> dict:
    """Runs a side and returns its measurements; `began` is the start time of its process."""
    epoch, rows = -(-examples // BATCH), (epochs - 1) * examples
    result = SIDES[side][0](Path(folder), epoch, epochs)
    clock, losses = result.pop("clock"), result.pop("losses")
    assert len(losses) == epochs, losses
    assert len(clock.steps) == epochs * epoch, len(clock.steps)
    return {
        "side": side, "examples_per_second": rows / (clock.steps[-1] - clock.steps[epoch - 1]),
        "cpu_ms_an_example": 1000 * (clock.cpu[-1] - clock.cpu[epoch - 1]) / rows,
        "first_step_after": clock.steps[0] - began, "whole": clock.steps[-1] - began, "whole_cpu": clock.cpu[-1],
        "tokens_a_row": result.pop("tokens") / rows, "first_loss": losses[0], "last_loss": losses[-1], **result,
    }  # fmt: skip


def make_row(steps: int, side: str, runs: list[dict]) -> dict:
    """Returns the row of a side, for `COLUMNS`: medians of its runs, minima and maxima."""
    row: dict = {"steps": steps, "side": SIDES[side][1], "runs": len(runs)}
    for name in FIGURES:
        row |= spread(name, [run[name] for run in runs])
    means = ("tokens_a_row", "first_loss", "last_loss")
    return row | {name: statistics.median(run[name] for run in runs) for name in means}


def make_ratios(steps: int, cache: str, side: str, runs: dict[str, list[dict]]) -> dict:
    """Returns the row that compares bert_jax's runs with those of another side, run by run, for `RATIOS`."""
    pairs = list(zip(runs[cache], runs[side], strict=True))
    row: dict = {"steps": steps, "ours": cache, "side": SIDES[side][1]}
    row |= spread("speed", [one["examples_per_second"] / other["examples_per_second"] for one, other in pairs])
    for name, time_of in {"cpu": "cpu_ms_an_example", "whole": "whole", "whole_cpu": "whole_cpu"}.items():
        row |= spread(name, [other[time_of] / one[time_of] for one, other in pairs])
    return row


def report(record: Record, runs: dict[int, dict[str, list[dict]]], parameters: int) -> None:
    """Records and prints the figures of all sides, by the number of steps."""
    rows = [make_row(steps, side, found[side]) for steps, found in runs.items() for side in SIDES]
    record.set_table("sides", COLUMNS, rows)
    pairs = itertools.product(("cold", "warm"), ("trainer", "trainer_by_length"))
    ratios = [make_ratios(steps, *pair, found) for pair in pairs for steps, found in runs.items()]
    record.set_table("ratios", RATIOS, sorted(ratios, key=lambda row: row["steps"]))
    seconds = [run["compile_seconds"] for found in runs.values() for run in found["cold"]]
    record.set_values(
        batch_size=BATCH, parameters=parameters, compile_seconds_minimum=min(seconds),
        compile_seconds_maximum=max(seconds),
    )  # fmt: skip
    print(record.render("sides"), record.render("ratios"), sep="\n\n")


def main() -> None:
    parser = make_parser(__doc__, "finetune_speed")
    parser.add_argument(
        "--tasks", nargs="+", default=["640x3", "3200x6"], metavar="EXAMPLESxEPOCHS",
        help="examples from the start of the file, and epochs: at least 2, because the first is not timed",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args()
    record = Record(options.json, MEASURES, packages=("torch", "transformers"))
    os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    runs: dict[int, dict[str, list[dict]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for examples, epochs in (map(int, task.split("x")) for task in options.tasks):
            folder = Path(temporary, str(examples))
            parameters = prepare(folder, data_folder(), examples)
            found = runs.setdefault(epochs * -(-examples // BATCH), {side: [] for side in SIDES})
            for number in range(options.repeats):
                for side, earlier in found.items():
                    began = time.monotonic()  # the machine's clock, shared by all processes
                    cache = str(folder / f"cache-{number}")
                    run = call(run_side, side, folder, examples, epochs, began, BERT_JAX_CACHE=cache)
                    earlier.append(run)
                    print(json.dumps(run), file=sys.stderr, flush=True)
                report(record, runs, parameters)  # after every round: a run that is stopped keeps what it has


if __name__ == "__main__":
    main()
