"""Compares Korean vocabularies: [UNK], tokens per word, and a BERT-Tiny trained on each. Run again to resume.

    python benchmarks/korean.py kowiki.jsonl.gz    # some half an hour on two CPU cores

The vocabularies are WordPiece as for English (uncased, accents stripped), WordPiece with --keep_accents, and unigram.
Each is trained on all articles but the held-out ones, which are those of the eval splits. Every model is trained on as
many tokens. Losses of a token cannot be compared between vocabularies; nats per character can: the loss times the
tokens per character of the held-out text. White space is no character. Vocabularies, datasets and runs, in --folder,
are kept for the next call with the same code.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import REPOSITORY, Record, add_json_argument

SIZE = 16_000
EVAL_FRACTION = 0.02
SEQ_LEN = 32
KINDS: dict[str, tuple[str, ...]] = {  # options of `bert-jax vocab`
    "wordpiece": (),
    "wordpiece --keep_accents": ("--keep_accents",),
    "unigram --keep_accents": ("--kind", "unigram", "--keep_accents"),
}
CONFIG: dict[str, Any] = {
    "model.hidden_act": "gelu_new", "model.num_attention_heads": 4, "model.max_position_embeddings": SEQ_LEN,
    "objective.nsp": False, "objective.mask_rate": 0.25, "data.seq_len": SEQ_LEN,
    "global_batch_size": 16, "total_steps": 8_000, "optimizer.b2": 0.98, "optimizer.warmup_steps": 200,
    "eval_every_steps": 0, "eval_batches": -1, "checkpoint.every_steps": 1_000, "tracking.samples": 0,
}  # fmt: skip
SENTENCES = (
    "그는 1950년 [MASK] 태어났다.",
    "이 영화는 2009년에 [MASK].",
    "[MASK] 대한민국의 도시이다.",
    "그녀는 대학교를 [MASK] 후 가수가 되었다.",
)
MEASURES = (
    "bert_jax/data/loading", "bert_jax/model", "bert_jax/text/sentences.py", "bert_jax/text/vocabulary_training.py",
    "bert_jax/text/wordpiece.py", "bert_jax/training/objectives.py",
    "bert_jax/training/optimizer.py", "bert_jax/training/train_step.py",
    "benchmarks/korean.py", "configs/bert_tiny.py",
)  # fmt: skip

VOCABULARIES = {
    "`bert-jax vocab`": "`{kind}`",
    "pieces": "{pieces:,}",
    "[UNK] of held-out tokens": "{unknown:.2%}",
    "tokens per word": "{tokens_per_word:.2f}",
    "tokens per character": "{tokens_per_character:.2f}",
}
MODELS = {
    "`bert-jax vocab`": "`{kind}`",
    "parameters": "{parameters:,}",
    "MLM loss": "{mlm_loss:.2f}",
    "unigram baseline": "{unigram_loss:.2f}",
    "MLM accuracy": "{mlm_accuracy:.1%}",
    "nats per character": "{nats_per_character:.3f}",
    "baseline per character": "{unigram_nats_per_character:.3f}",
}
FILLS = {"`bert-jax vocab`": "`{kind}`", "text": "{text}", "most probable pieces": "{fills}"}


def bert_jax(*arguments: object) -> None:
    """Runs a subcommand in a child process."""
    subprocess.run([sys.executable, "-m", "bert_jax.cli", *map(str, arguments)], check=True)


def write_articles(source: Path, folder: Path) -> list[str]:
    """Writes `all.jsonl` and `training.jsonl`, and returns the articles that only the first has.

    Those are the ones that `prepare` holds out of `all.jsonl`: the lowest hashes.
    """
    from bert_jax.data.corpora import corpus
    from bert_jax.data.hashing import content_hash

    with gzip.open(source, "rt", encoding="utf-8") as lines:
        rows = [json.dumps({"text": json.loads(line)["text"]}, ensure_ascii=False) + "\n" for line in lines]
    everything = folder / "all.jsonl"
    everything.write_text("".join(rows), encoding="utf-8")
    options = corpus.CorpusOptions()
    documents = [text for piece in corpus.plan([str(everything)], options) for text in corpus.read(piece, options)]
    held_out = [content_hash(text) < int(EVAL_FRACTION * 2**64) for text in documents]
    kept = [row for row, is_held_out in zip(rows, held_out, strict=True) if not is_held_out]
    (folder / "training.jsonl").write_text("".join(kept), encoding="utf-8")
    return [text for text, is_held_out in zip(documents, held_out, strict=True) if is_held_out]


def make_dataset(folder: Path, kind: str) -> tuple[Path, Path]:
    """Returns the vocabulary and the dataset of a kind, made if missing."""
    name = kind.replace(" --", "_")
    vocabulary = folder / f"{name}.json"
    data = folder / f"data_{name}"
    if not vocabulary.exists():
        bert_jax("vocab", "--input", folder / "training.jsonl", "--output", vocabulary, "--size", SIZE, *KINDS[kind])
    if not (data / "dataset.json").exists():
        bert_jax(
            "prepare", "--input", folder / "all.jsonl", "--vocab", vocabulary, "--output", data, "--language", "ko",
            "--seq_len", SEQ_LEN, "--pairs", "none", "--eval_fraction", EVAL_FRACTION,
        )  # fmt: skip
    return vocabulary, data


def vocabulary_row(vocabulary: Path, held_out: list[str]) -> dict[str, Any]:
    """Returns what a vocabulary makes of the held-out text."""
    from bert_jax.text.tokenizer import read_tokenizer

    tokenizer = read_tokenizer(vocabulary)
    lines = [line for text in held_out for line in text.split("\n")]
    tokens = [token for ids in tokenizer.encode_batch(lines) for token in ids]
    words = [word for line in lines for word in line.split()]
    return {
        "pieces": tokenizer.vocab_size,
        "unknown": tokens.count(tokenizer.unk_id) / len(tokens),
        "tokens_per_word": len(tokens) / len(words),
        "tokens_per_character": len(tokens) / sum(map(len, words)),
    }


def train(workdir: Path, data: Path) -> dict[str, float]:
    """Trains the model, or resumes or finishes it, and returns its scores on the eval split."""
    settings = {**CONFIG, "data.path": data}
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    bert_jax("pretrain", "--config=bert_tiny", f"--workdir={workdir}", *flags)
    command = [sys.executable, "-m", "bert_jax.cli", "evaluate", "--checkpoint", workdir, "--data", data, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def fills(workdir: Path) -> list[dict[str, str]]:
    """Returns the three most probable pieces for the mask of each sentence, with their probabilities."""
    import unicodedata

    import bert_jax as library

    model = library.load(str(workdir))
    rows = []
    for text in SENTENCES:
        found = model.fill_mask(text, top=3)[0]
        pieces = (f"`{unicodedata.normalize('NFC', one.token)}` {one.probability:.0%}" for one in found)
        rows.append({"text": text, "fills": ", ".join(pieces)})
    return rows


def add_rows(record: Record, table: str, columns: dict[str, str], kind: str, rows: list[dict[str, Any]]) -> None:
    """Replaces the rows of a kind in a table."""
    stamped = [{"kind": kind, **row, **record.stamp} for row in rows]
    merged = {name: [row for row in record.earlier(table) if row["kind"] == name] for name in KINDS} | {kind: stamped}
    record.set_table(table, columns, [row for name in KINDS for row in merged[name]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, help="articles as JSON lines with a field text, .gz")
    parser.add_argument("--only", choices=KINDS, help="one vocabulary; the others keep their rows")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "korean", help="datasets and runs")
    add_json_argument(parser, "korean")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from bert_jax.model import parameter_count
    from bert_jax.training.checkpoints import open_checkpoint

    record = Record(options.json, MEASURES, packages=("tokenizers", "sentencepiece", "sentencex"))
    folder = options.folder / record.stamp["code"]
    folder.mkdir(parents=True, exist_ok=True)
    for table, columns in (("vocabularies", VOCABULARIES), ("models", MODELS), ("fills", FILLS)):
        record.content["tables"][table] = {"columns": columns, "rows": record.earlier(table)}
    held_out = write_articles(options.input, folder)
    for kind in [options.only] if options.only else KINDS:
        vocabulary, data = make_dataset(folder, kind)
        row = vocabulary_row(vocabulary, held_out)
        add_rows(record, "vocabularies", VOCABULARIES, kind, [row])
        workdir = folder / f"run_{data.name}"
        scores = train(workdir, data)
        scores |= {
            "parameters": parameter_count(open_checkpoint(str(workdir)).bert_config),
            "nats_per_character": scores["mlm_loss"] * row["tokens_per_character"],
            "unigram_nats_per_character": scores["unigram_loss"] * row["tokens_per_character"],
        }
        add_rows(record, "models", MODELS, kind, [scores])
        add_rows(record, "fills", FILLS, kind, fills(workdir))
    million = CONFIG["total_steps"] * CONFIG["global_batch_size"] * SEQ_LEN / 1e6
    characters = sum(len(word) for text in held_out for word in text.split())
    record.set_values(size=SIZE, million_tokens=million, held_out_articles=len(held_out), characters=characters)
    for table in record.content["tables"]:
        print(record.render(table), "\n")


if __name__ == "__main__":
    main()
