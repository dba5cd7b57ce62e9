"""Continues a small BERT of English Wikipedia on books, with its own vocabulary and with new words, at equal steps.

    BERT_JAX_DATA=FOLDER python benchmarks/continue_pretraining.py     # some 15 minutes on two cores; resumes

FOLDER holds corpus/enwiki/*.jsonl.gz and corpus/books/*.txt.gz. The losses per token are those of the runs, on the eval
splits; those per word and per character are of other, held-out files, see `word_losses.py`. Vocabularies, datasets and
runs are in --folder, in a folder of its own for each version of the code that this measures.
"""

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from record import REPOSITORY, Record, add_json_argument
from word_losses import SEQ_LEN, Text, choose_texts, word_loss

from bert_jax import cli

GENERAL, GENERAL_HELD_OUT = slice(0, 5), slice(-1, None)
"""Files of English Wikipedia."""
DOMAIN, DOMAIN_HELD_OUT = slice(0, -6), slice(-6, None)
"""Books."""
VOCABULARY_SIZE, NEW_WORDS, MIN_COUNT = 8192, 2000, 20
TEXTS = 2000
"""Held-out texts of each domain."""
MEASURES = (
    "bert_jax/text/vocabulary_extension.py", "bert_jax/training/initialization.py",
    "configs/bert_tiny.py",
    "configs/continue.py",
)  # fmt: skip
SHORT = {
    "model.hidden_act": "gelu_new", "model.max_position_embeddings": SEQ_LEN, "objective.nsp": False,
    "optimizer.b2": 0.98, "global_batch_size": 32, "eval_batches": 60, "tracking.samples": 0,
}  # fmt: skip
BASE = {**SHORT, "total_steps": 5_000, "optimizer.warmup_steps": 200, "eval_every_steps": 2_500}
CONTINUED = {
    "global_batch_size": 32, "eval_batches": 60, "tracking.samples": 0, "total_steps": 1_000, "scan_layers": False,
    "optimizer.warmup_steps": 60, "optimizer.learning_rate": 1e-3, "optimizer.b2": 0.98, "eval_every_steps": 0,
}  # fmt: skip
COLUMNS = {
    "model": "{model}",
    "pieces": "{pieces:,}",
    "steps on books": "{steps:,}",
    "books: loss per token": "{mlm_loss:.3f}",
    "tokens per word": "{domain_tokens_per_word:.3f}",
    "per word": "{domain_nats_per_word:.3f}",
    "per character": "{domain_nats_per_character:.4f}",
    "Wikipedia: loss per token": "{old_mlm_loss:.3f}",
    "per word ": "{old_nats_per_word:.3f}",
}


def run(*words: object) -> None:
    """Runs `bert-jax`. Raises SystemExit with its status if it fails."""
    if status := cli.main([str(word) for word in words]):
        raise SystemExit(status)


def corpus_files(data: Path, folder: str, suffix: str, part: slice) -> list[str]:
    return [str(path) for path in sorted((data / "corpus" / folder).glob(f"*{suffix}"))[part]]


def prepare(folder: Path, data: Path) -> None:
    """Makes the two vocabularies and the three datasets, unless they exist."""
    general = corpus_files(data, "enwiki", ".jsonl.gz", GENERAL)
    domain = corpus_files(data, "books", ".txt.gz", DOMAIN)
    old, new = folder / "tokenizer.json", folder / "extended.json"
    if not old.exists():
        run("vocab", "--input", *general, "--size", VOCABULARY_SIZE, "--output", old)
    if not new.exists():
        options = ["--add", NEW_WORDS, "--min_count", MIN_COUNT]
        run("vocab", "--extend", old, "--input", *domain, *options, "--output", new)
    for name, files, vocabulary in (("general", general, old), ("books", domain, old), ("books_new", domain, new)):
        if not (folder / name / "dataset.json").exists():
            options = ["--seq_len", SEQ_LEN, "--pairs", "none", "--workers", 2]
            run("prepare", "--input", *files, "--vocab", vocabulary, "--output", folder / name, *options)


def train(folder: Path) -> None:
    """Trains the base, continues it on both datasets of books, and saves the initial state of the extended model."""
    from bert_jax import Training, load_config

    def flags(settings: dict[str, Any]) -> list[str]:
        return [f"--config.{key}={value}" for key, value in settings.items()]

    data, base = {"data.path": folder / "general"}, folder / "base"
    run("pretrain", "--config=bert_tiny", f"--workdir={base}", *flags({**BASE, **data}))
    for name in ("books", "books_new"):
        settings = {**CONTINUED, "data.path": folder / name, "init": base}
        run("pretrain", "--config=continue", f"--workdir={folder / f'continued_{name}'}", *flags(settings))
    training = Training(load_config("continue", {**CONTINUED, "data.path": folder / "books_new", "init": base}))
    training.save(str(folder / "grown"), training.initial_state())


def evaluations(workdir: Path) -> list[dict[str, Any]]:
    """Returns the evaluations of a run, in order."""
    from etils import epath

    from bert_jax.tracking.metrics import read_metrics

    return [row for row in read_metrics(epath.Path(workdir)) if row.get("split") == "eval"]


def word_losses(checkpoint: Path, texts: dict[str, list[Text]]) -> dict[str, float]:
    """Returns the losses of a checkpoint on the texts of both domains, by DOMAIN_NAME."""
    return {
        f"{domain}_{name}": value
        for domain, chosen in texts.items() for name, value in asdict(word_loss(str(checkpoint), chosen)).items()
    }  # fmt: skip


def measure(folder: Path, data: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the rows of the table, and the single values."""
    from bert_jax.text.tokenizer import read_tokenizer
    from bert_jax.training.checkpoints import open_checkpoint
    from bert_jax.training.evaluation import evaluate_checkpoint

    tokenizers = [read_tokenizer(folder / name) for name in ("tokenizer.json", "extended.json")]
    texts = {
        "domain": choose_texts(corpus_files(data, "books", ".txt.gz", DOMAIN_HELD_OUT), tokenizers, TEXTS),
        "old": choose_texts(corpus_files(data, "enwiki", ".jsonl.gz", GENERAL_HELD_OUT), tokenizers, TEXTS),
    }
    plain, extended = (evaluations(folder / f"continued_{name}") for name in ("books", "books_new"))
    rows = []
    for name, tokenizer, checkpoint, scores in (
        ("before", tokenizers[0], "base", plain[0]),
        ("before, new words added", tokenizers[1], "grown", extended[0]),
        ("continued", tokenizers[0], "continued_books", plain[-1]),
        ("continued with new words", tokenizers[1], "continued_books_new", extended[-1]),
    ):
        row = {"model": name, "pieces": tokenizer.vocab_size, "steps": scores["step"]}
        old = evaluate_checkpoint(open_checkpoint(str(folder / checkpoint)), str(folder / "general"))
        row |= {"mlm_loss": scores["mlm_loss"], "old_mlm_loss": old["mlm_loss"]}
        rows.append(row | word_losses(folder / checkpoint, texts))
    values = {
        "added": tokenizers[1].vocab_size - tokenizers[0].vocab_size, "domain_words": rows[0]["domain_words"],
        "old_words": rows[0]["old_words"],
    }  # fmt: skip
    return rows, values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "runs" / "continue_pretraining", help="datasets and runs"
    )
    add_json_argument(parser, "continue_pretraining")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if not os.environ.get("BERT_JAX_DATA"):
        parser.error("BERT_JAX_DATA is not set; set it to the folder of the corpora")
    data = Path(os.environ["BERT_JAX_DATA"])
    record = Record(options.json, MEASURES)
    folder = options.folder / record.stamp["code"]
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder, data)
    train(folder)
    rows, values = measure(folder, data)
    record.set_values(**values)
    record.set_table("losses", COLUMNS, rows)
    print(record.render("losses"))


if __name__ == "__main__":
    main()
