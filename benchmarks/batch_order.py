"""Compares batches sorted by length with shuffled ones: the cost in score, and the savings in padding.

    python benchmarks/batch_order.py prepare --encoder=FOLDER --data=FOLDER --output=WORK
    python benchmarks/batch_order.py orders --folder=WORK
    python benchmarks/batch_order.py run --folder=WORK --results=FILE.jsonl
    python benchmarks/batch_order.py table --results=FILE.jsonl

`prepare` takes an encoder in Hugging Face's layout (model.safetensors, config.json, vocab.txt) and writes small
tasks: samples of STS-B, CoLA, SST-2 and WNUT-17, and pairs made from SQuAD in the way of QNLI. --data has glue/,
squad/ and wnut17/. An encoder keeps only the word pieces of its task, which changes no score.

`orders` trains nothing. For each order of batches it prints the tokens per example with padding, and the variation of
labels between batches: the variance of a batch's mean label, and that of its moving average (0.9, as in Adam), as
multiples of those of random batches.

`run` fine-tunes the top layers, the pooler and the task's output in torch. Their inputs are hidden states that the
layers below have computed once, without dropout, so a run takes seconds of one core. The batches are those of
`bert_jax` with `data.sort_window`; 1 is shuffled batches. Optimizer, schedule, dropout and batch size are those of
`configs/finetune/default.py`. The runs are in the order of their seeds, and may be stopped at any time. Each finished
run is appended to the results as a line, and is not repeated. Several processes may work on one folder.
--trained_layers=all trains the whole encoder.
"""

import argparse
import functools
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BATCH, MAX_SEQ_LEN, EPOCHS = 32, 64, 3
WARMUP, WEIGHT_DECAY, B1, B2, EPS, CLIP = 0.1, 0.01, 0.9, 0.999, 1e-6, 1.0
TASKS = {"stsb": "spearman", "wnut17": "f1", "qnli": "accuracy", "sst2": "accuracy", "cola": "matthews"}
SIDES = "1:8:64"
SETTINGS = ",".join(f"{task}:{rate}:on:{SIDES}" for rate in ("1e-4", "3e-4") for task in ("stsb", "wnut17", "qnli"))


# --- Tasks -----------------------------------------------------------------------------------------------------------
def sample(rows: list, count: int) -> list:
    return random.Random(0).sample(rows, min(count, len(rows)))


def glue_rows(data: Path, name: str, split: str) -> list[dict]:
    from bert_jax.finetuning.rows import BadRows
    from bert_jax.finetuning.tasks.glue import GlueTask

    task = GlueTask.of(name)
    return [
        {"text": row.text_a, **({} if row.text_b is None else {"text_pair": row.text_b}), "label": row.label}
        for row in task.read(task.find(str(data / "glue"), {})[split], BadRows(), split=split)
    ]


def qnli_rows(file: Path) -> list[dict]:
    """Returns a pair per question: the sentence with its answer (label 1), or another one of the paragraph (0)."""
    from sentencex import segment

    rng, rows = random.Random(0), []
    for article in json.loads(file.read_text())["data"]:
        for paragraph in article["paragraphs"]:
            sentences = [text.strip() for text in segment("en", paragraph["context"]) if text.strip()]
            for question in paragraph["qas"]:
                answer = question["answers"][0]["text"]
                holding = [text for text in sentences if answer in text]
                others = [text for text in sentences if answer not in text]
                if len(holding) == 1 and others:
                    label = rng.randrange(2)
                    text = holding[0] if label else rng.choice(others)
                    rows.append({"text": question["question"].strip(), "text_pair": text, "label": label})
    return rows


def write_texts(folder: Path, train: list[dict], dev: list[dict]) -> None:
    for name, rows in (("train", train), ("dev", dev)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_sentences(folder: Path, data: Path, train_rows: int, dev_rows: int) -> None:
    for name, count in (("train", train_rows), ("dev", dev_rows)):
        lines = [line.strip() for line in (data / "wnut17" / f"{name}.conll").read_text().split("\n")]
        blocks = [block.strip() for block in "\n".join(lines).split("\n\n")]
        (folder / f"{name}.conll").write_text("\n\n".join(sample([one for one in blocks if one], count)) + "\n")


def prepare(options: argparse.Namespace) -> None:
    for name in options.tasks.split(","):
        folder = options.output / name
        folder.mkdir(parents=True, exist_ok=True)
        if name == "wnut17":
            write_sentences(folder, options.data, options.examples, options.dev_examples)
        else:
            if name == "qnli":
                files = ("train-v1.1.partial-12articles.json", "dev-v1.1.json")
                train, dev = (qnli_rows(options.data / "squad" / file) for file in files)
            else:
                train, dev = (glue_rows(options.data, name, split) for split in ("train", "dev"))
            write_texts(folder, sample(train, options.examples), sample(dev, options.dev_examples))
        write_encoder(options.encoder, folder)


def write_encoder(encoder: Path, folder: Path) -> None:
    """Writes the encoder with only the word pieces that occur in a task's texts."""
    from safetensors.numpy import load_file, save_file

    pieces = (encoder / "vocab.txt").read_text().split("\n")
    special = {pieces.index(piece) for piece in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")}
    _, training, splits = read_task(folder, encoder / "vocab.txt")
    rows = [split.encoded for split in (training, *splits)]
    kept = sorted(special.union(*(sequence.input_ids for one in rows for sequence in one.sequences)))
    weights, words = load_file(encoder / "model.safetensors"), "embeddings.word_embeddings.weight"
    weights[words] = np.ascontiguousarray(weights[words][kept])
    weights.pop("embeddings.position_ids", None)
    target = folder / "encoder"
    target.mkdir(exist_ok=True)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    config = json.loads((encoder / "config.json").read_text()) | {"vocab_size": len(kept)}
    (target / "config.json").write_text(json.dumps(config))
    (target / "vocab.txt").write_text("\n".join(pieces[index] for index in kept) + "\n")


def read_task(folder: Path, vocabulary: Path) -> Any:
    from bert_jax.config import FinetuneConfig, load_config
    from bert_jax.finetuning.tasks import kinds
    from bert_jax.text.conversion import convert_vocabulary

    settings: dict[str, object] = {"data.path": folder, "task.max_seq_len": MAX_SEQ_LEN}
    if folder.name != "wnut17":
        has_pairs = "text_pair" in json.loads((folder / "train.jsonl").read_text().split("\n")[0])
        settings |= {
            "task.train": "train.jsonl", "task.dev": "dev.jsonl", "task.text": "text", "task.label": "label",
            "task.text_pair": "text_pair" if has_pairs else "", "task.regression": folder.name == "stsb",
        }  # fmt: skip
    name = "finetune/ner" if folder.name == "wnut17" else "finetune/text"
    config = load_config(name, [(key, str(value)) for key, value in settings.items()], kind=FinetuneConfig)
    tokenizer = convert_vocabulary(str(vocabulary))
    return kinds.read_task(config, tokenizer)


# --- Orders ----------------------------------------------------------------------------------------------------------
def orders(options: argparse.Namespace) -> None:
    """Prints the padding and the variation of labels in each order, over all examples in the folder."""
    from bert_jax.finetuning.batches import epoch_of_batches
    from bert_jax.text.sequences import padded_length

    print(
        "| task | examples | window | tokens per example, padded | variance of a batch's mean label | of its moving "
        f"average |\n|{' --- |' * 6}"
    )
    for name in options.tasks.split(","):
        task, training, _ = read_task(options.folder / name, options.folder / name / "encoder" / "vocab.txt")
        rows, lengths = training.encoded, training.encoded.lengths()
        # The label of a tagged sentence is the number of its words with a tag other than O.
        labels = np.array([np.sum(np.asarray(label) > 0) if task.kind == "tag" else label for label in rows.labels])
        labels = (labels - labels.mean()) / labels.std()
        found: dict[int | None, list[float]] = {}
        for window in (1, 2, 4, 8, 16, 64, None):
            tokens, of_batches, averages = [], [], []
            for seed in range(20):
                average = 0.0
                for epoch in range(EPOCHS):
                    for batch in epoch_of_batches(rows, BATCH, seed, epoch, window=window):
                        if len(batch) == BATCH:
                            mean = labels[batch].mean()
                            average = B1 * average + (1 - B1) * mean
                            of_batches.append(mean**2)
                            averages.append(average**2)
                            tokens.append(padded_length(int(lengths[batch].max()), MAX_SEQ_LEN))
            found[window] = [np.mean(values) for values in (tokens, of_batches, averages)]
        for window, (length, of_batch, average) in found.items():
            random_batch, random_average = found[1][1:]
            ratios = f"{of_batch / random_batch:.2f} | {average / random_average:.2f}"
            print(f"| {name} | {len(rows):,} | {window or '64, shuffled over the epoch'} | {length:.1f} | {ratios} |")


# --- Runs ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Setting:
    """Settings of a run, except for its order of batches and its seed."""

    task: str
    trained_layers: int | None  # None: the whole encoder
    rate: float
    bias_correction: bool


@dataclass(frozen=True)
class Work:
    """A task with its selected examples."""

    folder: Path
    task: Any
    train: Any
    dev: Any

    def build(self) -> Any:
        """Returns `transformers`' model with the encoder's weights, and an output initialized from torch's seed."""
        from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

        kind = AutoModelForTokenClassification if self.task.kind == "tag" else AutoModelForSequenceClassification
        return kind.from_pretrained(self.folder / "encoder", num_labels=self.task.size)


@functools.cache
def work_of(folder: Path) -> Work:
    task, training, (dev,) = read_task(folder, folder / "encoder" / "vocab.txt")
    return Work(folder, task, training.encoded, dev)


@dataclass(frozen=True)
class Inputs:
    """Inputs of the trained layers, per example: hidden states of the layers below, or tokens if all are trained."""

    rows: Any
    starts: np.ndarray
    hidden: np.ndarray | None  # fp32 [all tokens, hidden_size]

    def batch(self, examples: np.ndarray) -> dict[str, Any]:
        import torch

        lengths = np.diff(self.starts)[examples]
        mask = np.arange(lengths.max()) < lengths[:, None]
        if self.hidden is None:
            input_ids, token_type_ids = np.zeros((2, *mask.shape), np.int64)
            for row, example in enumerate(examples):
                sequence = self.rows.sequences[example]
                input_ids[row, : lengths[row]] = sequence.input_ids
                token_type_ids[row, sequence.first_length : lengths[row]] = 1
            found = {"input_ids": input_ids, "token_type_ids": token_type_ids, "attention_mask": mask.astype(int)}
            return {name: torch.from_numpy(entry) for name, entry in found.items()}
        hidden = np.zeros((*mask.shape, self.hidden.shape[1]), np.float32)
        for row, example in enumerate(examples):
            hidden[row, : lengths[row]] = self.hidden[self.starts[example] : self.starts[example + 1]]
        added = np.where(mask, np.float32(0), np.finfo(np.float32).min)[:, None, None]
        return {"hidden": torch.from_numpy(hidden), "mask": torch.from_numpy(added)}


@functools.cache
def inputs_of(work: Path, split: str, trained_layers: int | None) -> Inputs:
    import torch

    of = work_of(work)
    rows = of.train if split == "train" else of.dev.encoded
    starts = np.concatenate([[0], np.cumsum(rows.lengths())])
    whole = Inputs(rows, starts, None)
    if trained_layers is None:
        return whole
    path = work / f"hidden-{split}-{trained_layers}.npy"
    if not path.exists():
        model = of.build().eval().bert
        hidden = np.zeros((starts[-1], model.config.hidden_size), np.float32)
        with torch.no_grad():
            for examples in by_length(rows):
                states = model(**whole.batch(examples), output_hidden_states=True).hidden_states[-1 - trained_layers]
                for example, of_example in zip(examples, states.numpy(), strict=True):
                    there = hidden[starts[example] : starts[example + 1]]
                    there[:] = of_example[: len(there)]
        unfinished = path.with_suffix(f".{os.getpid()}.npy")
        np.save(unfinished, hidden)
        unfinished.replace(path)
    return Inputs(rows, starts, np.load(path))


def by_length(rows: Any) -> Iterable[np.ndarray]:
    from bert_jax.finetuning.batches import in_order

    return in_order(rows, 64)


def outputs(model: Any, trained_layers: int | None, batch: dict[str, Any]) -> Any:
    if trained_layers is None:
        return model(**batch).logits
    states, pooler = batch["hidden"], model.bert.pooler
    for number in range(trained_layers, 0, -1):
        layer = model.bert.encoder.layer[-number]
        states = apply_layer(layer, states, batch["mask"], states[:, :1] if pooler and number == 1 else states)
    return model.classifier(model.dropout(pooler(states) if pooler else states))


def apply_layer(layer: Any, states: Any, mask: Any, queries: Any) -> Any:
    """Returns the outputs of a layer of `transformers` at `queries` only, [B, Q, hidden_size], a subset of `states`.

    The pooler reads one token, so that the last layer computes no other.
    """
    attention = layer.attention.self
    heads, size = attention.num_attention_heads, attention.attention_head_size
    q, k, v = (
        project(entry).unflatten(-1, (heads, size)).transpose(1, 2)
        for project, entry in ((attention.query, queries), (attention.key, states), (attention.value, states))
    )
    probabilities = attention.dropout((q @ k.transpose(2, 3) / size**0.5 + mask).softmax(-1))
    attended = layer.attention.output((probabilities @ v).transpose(1, 2).flatten(2), queries)
    return layer.output(layer.intermediate(attended), attended)


class AdamW:
    """The AdamW of `bert_jax`, which equals torch's if `bias_correction` is True."""

    def __init__(self, model: Any, setting: Setting) -> None:
        import torch

        layers = len(model.bert.encoder.layer)
        parts = ("bert.pooler.", "classifier.") + tuple(
            f"bert.encoder.layer.{layers - 1 - number}." for number in range(setting.trained_layers or 0)
        )
        named = [(name, entry) for name, entry in model.named_parameters()]
        if setting.trained_layers is not None:
            named = [(name, entry) for name, entry in named if name.startswith(parts)]
        self.parameters = [entry for _, entry in named]
        self._decays = [name.endswith("weight") and "LayerNorm" not in name for name, _ in named]
        self._moments = [(torch.zeros_like(entry), torch.zeros_like(entry)) for entry in self.parameters]
        self._updates, self._corrects = 0, setting.bias_correction

    def step(self, rate: float) -> None:
        import torch

        self._updates += 1
        m_scale, v_scale = (1 - B1**self._updates, 1 - B2**self._updates) if self._corrects else (1.0, 1.0)
        with torch.no_grad():
            for entry, decays, (m, v) in zip(self.parameters, self._decays, self._moments, strict=True):
                m.mul_(B1).add_(entry.grad, alpha=1 - B1)
                v.mul_(B2).addcmul_(entry.grad, entry.grad, value=1 - B2)
                direction = (m / m_scale) / ((v / v_scale).sqrt() + EPS)
                entry.sub_(rate * (direction + WEIGHT_DECAY * entry if decays else direction))
                entry.grad = None


def loss_of(kind: str, logits: Any, rows: Any, examples: np.ndarray) -> Any:
    import torch
    from torch.nn import functional

    if kind == "regress":
        return functional.mse_loss(logits[:, 0], torch.from_numpy(rows.labels[examples]))
    if kind == "classify":
        return functional.cross_entropy(logits, torch.from_numpy(rows.labels[examples]).long())
    labels = np.full(logits.shape[:2], -1)
    for row, example in enumerate(examples):
        labels[row, : len(rows.labels[example])] = rows.labels[example]
    return functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten(), ignore_index=-1)


def run_one(folder: Path, setting: Setting, window: int, seed: int) -> dict:
    """Returns a line of the results: the settings, the score on dev, losses of epochs, and the time per example."""
    import torch

    from bert_jax.finetuning.batches import epoch_of_batches

    began = time.process_time()
    work = work_of(folder / setting.task)
    train, dev = (inputs_of(work.folder, split, setting.trained_layers) for split in ("train", "dev"))
    torch.manual_seed(seed)
    model = work.build().train()
    optimizer = AdamW(model, setting)
    batches = [
        batch for epoch in range(EPOCHS) for batch in epoch_of_batches(work.train, BATCH, seed, epoch, window=window)
    ]  # fmt: skip
    total, warmup = len(batches), int(WARMUP * len(batches))
    losses, tokens, cpu = [], [], []
    for step, examples in enumerate(batches):
        logits = outputs(model, setting.trained_layers, train.batch(examples))
        loss = loss_of(work.task.kind, logits, work.train, examples)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizer.parameters, CLIP)
        # As `bert_jax` and the paper's code: the decay counts from step 0.
        optimizer.step(setting.rate * (step / warmup if step < warmup else 1 - step / total))
        losses.append(loss.item())
        tokens.append(int(np.diff(train.starts)[examples].max()))
        cpu.append(time.process_time())
    model.eval()
    dev_outputs: list[Any] = [None] * len(work.dev.encoded)
    with torch.no_grad():
        for examples in by_length(work.dev.encoded):
            logits = outputs(model, setting.trained_layers, dev.batch(examples)).numpy()
            for example, example_logits in zip(examples, logits, strict=True):
                length = dev.starts[example + 1] - dev.starts[example]
                dev_outputs[example] = example_logits[:length] if work.task.kind == "tag" else example_logits
    an_epoch = total // EPOCHS
    return {
        "task": setting.task, "trained_layers": setting.trained_layers, "rate": setting.rate,
        "bias_correction": setting.bias_correction, "window": window, "seed": seed,
        "score": round(score(work, dev_outputs), 5),
        "losses": [round(statistics.mean(losses[i : i + an_epoch]), 4) for i in range(0, total, an_epoch)],
        "tokens_per_example": round(statistics.mean(tokens), 2),
        "cpu_ms_per_example": round(1000 * (cpu[-1] - cpu[an_epoch - 1]) / ((EPOCHS - 1) * len(work.train)), 3),
        "cpu_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def score(work: Work, dev_outputs: list[np.ndarray]) -> float:
    """Returns the metric in `TASKS` for a model's outputs on the dev set."""
    from bert_jax.finetuning import metrics

    name = TASKS[work.folder.name]
    if name != "matthews":
        return work.task.score(work.dev, dev_outputs)[name]
    labels = [int(example.label) for example in work.dev.examples]
    return metrics.matthews(labels, np.stack(dev_outputs).argmax(axis=-1))


def run(options: argparse.Namespace) -> None:
    """Runs each seed of each setting in each order, unless it is done or another process is running it."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    layers = None if options.trained_layers == "all" else int(options.trained_layers)
    claims = options.folder / "claims"
    claims.mkdir(exist_ok=True)
    options.results.touch()
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for text in options.settings.split(","):
            task, rate, bias_correction, *windows = text.split(":")
            setting = Setting(task, layers, float(rate), bias_correction == "on")
            for window in map(int, windows):
                key = (task, layers, setting.rate, setting.bias_correction, window, seed)
                done = {key_of(row) for row in read_results(options.results)}
                if key in done or not take(claims / "-".join(map(str, key))):
                    continue
                line = json.dumps(run_one(options.folder, setting, window, seed))
                with options.results.open("a") as file:
                    file.write(line + "\n")
                print(line, flush=True)


def take(claim: Path) -> bool:
    """Claims a run for this process. Returns False if another live process has claimed it."""
    try:
        with claim.open("x") as file:
            file.write(str(os.getpid()))
        return True
    except FileExistsError:
        owner = claim.read_text()
    if not owner or Path(f"/proc/{owner}").exists():
        return False
    claim.unlink(missing_ok=True)
    return take(claim)


def key_of(row: dict) -> tuple:
    return tuple(row[name] for name in ("task", "trained_layers", "rate", "bias_correction", "window", "seed"))


def read_results(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


FEWEST_SEEDS = 5
"""Settings with fewer seeds are not in the table."""


# --- Table -----------------------------------------------------------------------------------------------------------
def table(options: argparse.Namespace) -> None:
    """Prints means of scores, and differences over the seeds that both sides have."""
    rows = read_results(options.results)
    print("Scores of the last state, on dev: mean (standard deviation). Differences are paired by seed.\n")
    compare(rows, "window", lambda row: row["window"], 1)
    if any(not row["bias_correction"] for row in rows):
        print()
        compare(rows, "bias correction", lambda row: "on" if row["bias_correction"] else "off", "off")


def compare(rows: list[dict], name: str, side_of: Callable[[dict], Any], base: Any) -> None:
    """Prints a line per setting and side, with the difference to the side `base` on the same seeds."""
    print(f"| task | layers | rate | {name} | runs | score | beside {base} (95% interval) | CPU ms per example |")
    print("|" + " --- |" * 8)
    groups: dict[tuple, dict[Any, dict[int, dict]]] = {}
    for row in rows:
        fixed = {**row, "window": None} if name == "window" else {**row, "bias_correction": None}
        groups.setdefault(key_of(fixed)[:-1], {}).setdefault(side_of(row), {})[row["seed"]] = row
    for key, runs in groups.items():
        sides = {side: of_seeds for side, of_seeds in runs.items() if len(of_seeds) >= FEWEST_SEEDS}
        if base not in sides or len(sides) < 2:
            continue
        for side, of_seeds in sorted(sides.items()):
            scores = [row["score"] for row in of_seeds.values()]
            shared = sorted(of_seeds.keys() & sides[base].keys())
            pairs = [of_seeds[seed]["score"] - sides[base][seed]["score"] for seed in shared]
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            difference = "" if side == base else f"{statistics.mean(pairs):+.3f} ({interval(pairs)})"
            cpu = statistics.median(row["cpu_ms_per_example"] for row in of_seeds.values())
            layers = "all" if key[1] is None else f"top {key[1]}"
            print(
                f"| {key[0]} | {layers} | {key[2]:g} | {side} | {len(scores)} | "
                f"{statistics.mean(scores):.3f} ({spread:.3f}) | {difference} | {cpu:.1f} |"
            )


def interval(values: list[float]) -> str:
    """Returns the bootstrapped 95% interval of the mean."""
    rng = np.random.default_rng(0)
    means = rng.choice(np.array(values), (10_000, len(values))).mean(axis=1)
    return "{:+.3f} to {:+.3f}".format(*np.quantile(means, (0.025, 0.975)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("prepare")
    one.add_argument("--encoder", type=Path, required=True)
    one.add_argument("--data", type=Path, default=os.environ.get("BERT_JAX_DATA"), help="default: $BERT_JAX_DATA")
    one.add_argument("--output", type=Path, required=True)
    one.add_argument("--tasks", default=",".join(TASKS))
    one.add_argument("--examples", type=int, default=1_000, help="training examples per task, at most")
    one.add_argument("--dev_examples", type=int, default=500, help="dev examples per task, at most")
    one.set_defaults(run=prepare)
    one = commands.add_parser("orders")
    one.add_argument("--folder", type=Path, required=True, help="output folder of prepare")
    one.add_argument("--tasks", default=",".join(TASKS))
    one.set_defaults(run=orders)
    one = commands.add_parser("run")
    one.add_argument("--folder", type=Path, required=True, help="output folder of prepare")
    one.add_argument("--results", type=Path, required=True)
    one.add_argument("--settings", default=SETTINGS, help="TASK:RATE:BIAS_CORRECTION:WINDOW:WINDOW..., comma-separated")
    one.add_argument("--trained_layers", default="1", help="number of trained layers, from the top, or all")
    one.add_argument("--seeds", type=int, default=20)
    one.add_argument("--first_seed", type=int, default=0)
    one.set_defaults(run=run)
    one = commands.add_parser("table")
    one.add_argument("--results", type=Path, required=True)
    one.set_defaults(run=table)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
