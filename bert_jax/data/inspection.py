"""Report on a prepared dataset: counts, lengths, padding, and some masked instances."""

import itertools
from typing import Any

import numpy as np

from bert_jax.batch import HostBatch, map_arrays
from bert_jax.data.dataset import PreparedDataset, SplitInfo
from bert_jax.data.loading.loader import PACKED_TOGETHER, TrainRows
from bert_jax.data.loading.masking import Masking
from bert_jax.data.loading.packing import pack_lengths
from bert_jax.data.preparation.report import render_text, text_counts
from bert_jax.errors import InputError
from bert_jax.text.tokenizer import Tokenizer

MAX_SEQUENCES = 8  # in a row, for the estimate of packing


def inspect_dataset(path: str, *, samples: int = 3, seed: int = 0) -> dict[str, Any]:
    """Returns the report of `bert-jax inspect` as one JSON object.

    Args:
      path: the dataset's folder.
      samples: the number of training instances to decode; `seed` selects them and their masks.
      seed: of samples and masks.

    Raises:
      InputError: the dataset was not found or is damaged.
    """
    if samples < 0:
        raise InputError(f"samples={samples}: must be at least 0")
    dataset = PreparedDataset(path)
    info, counts = dataset.info, dataset.token_counts()
    special = [dataset.tokenizer.token_to_id(token) for token in dataset.tokenizer.special_tokens]
    return {
        "path": path,
        "hash": info.hash,
        "seq_len": info.seq_len,
        "pairs": info.options["pairs"],
        "vocab_size": dataset.tokenizer.vocab_size,
        "lowercase": dataset.tokenizer.lowercase,
        "unk_rate": dataset.unknown_share(),
        "unused_pieces": int((np.delete(counts, special) == 0).sum()),
        "text": text_counts(info),
        "splits": {
            name: _split(split, dataset.lengths(name), info.seq_len)
            for name, split in info.splits.items()
            if split.instances
        },
        "samples": _samples(dataset, min(samples, dataset.size("train")), seed),
    }


def _split(split: SplitInfo, lengths: np.ndarray, seq_len: int) -> dict[str, Any]:
    sample = lengths[:PACKED_TOGETHER]
    rows = sum(count for count, _ in pack_lengths(sample, seq_len, MAX_SEQUENCES))
    return {
        "shards": len(split.shards),
        **{count: getattr(split, count) for count in ("documents", "sentences", "tokens", "instances")},
        "random_next_share": split.random_next / split.instances,
        "mean_length": float(lengths.mean()),
        "padding_share": 1 - float(lengths.mean()) / seq_len,
        "packed_padding_share": 1 - float(sample.sum(dtype=np.int64)) / (rows * seq_len),
    }


def _samples(dataset: PreparedDataset, count: int, seed: int) -> list[dict[str, Any]]:
    if not count:
        return []
    batch = TrainRows(dataset, seed=seed, masking=Masking()).rows(np.arange(count))
    labels = ["random" if label else "next" for label in batch["next_sentence_labels"][:, 0]]
    return [
        {
            "text": _text(dataset.tokenizer, map_arrays(lambda entry, row=row: entry[row], batch)),
            "tokens": int(batch["sequence_ids"][row].sum()),
            "predictions": int(batch["masked_weights"][row].sum()),
            "b_is": None if dataset.info.options["pairs"] == "none" else labels[row],
        }
        for row in range(count)
    ]


def _text(tokenizer: Tokenizer, row: HostBatch) -> str:
    """Decodes a row, with spaces around special tokens; a masked position is shown as {original>input}."""
    ids = row["input_ids"][: row["sequence_ids"].sum()].tolist()
    marked = {
        position: f"{{{tokenizer.vocab[original]}>{tokenizer.vocab[ids[position]]}}}"
        for position, original, weight in zip(
            *(row[name].tolist() for name in ("masked_positions", "masked_ids", "masked_weights")), strict=True
        )
        if weight
    }
    alone = [marked.get(at) or tokenizer.vocab[token] * (tokenizer.vocab[token] in tokenizer.special_tokens)
             for at, token in enumerate(ids)]  # fmt: skip
    parts: list[str] = []
    for text, group in itertools.groupby(range(len(ids)), alone.__getitem__):
        places = list(group)
        parts += [text] * len(places) if text else [tokenizer.decode([ids[place] for place in places])]
    return " ".join(parts)


def render(report: dict[str, Any]) -> str:
    """Formats the report as lines for a terminal."""
    case = "uncased" if report["lowercase"] else "cased"
    lines = [
        f"{report['path']}: sequences of {report['seq_len']} tokens, pairs {report['pairs']}, "
        f"{report['vocab_size']:,} pieces, {case}",
        f"[UNK] {report['unk_rate']:.3%} of tokens; {report['unused_pieces']:,} pieces never occur",
    ]
    lines += ["", *render_text(report["text"])]
    for name, split in report["splits"].items():
        has_pairs = report["pairs"] == "nsp"
        random_next = f", {split['random_next_share']:.1%} with a random second segment" if has_pairs else ""
        lines += [
            "",
            f"{name}: {split['instances']:,} instances{random_next}; shards: {split['shards']:,}",
            f"  {split['documents']:,} documents, {split['sentences']:,} sentences, {split['tokens']:,} tokens",
            f"  {split['mean_length']:.1f} tokens per sequence; padding {split['padding_share']:.1%}, "
            f"{split['packed_padding_share']:.1%} if packed",
        ]
    for sample in report["samples"]:
        b_is = f", B is {sample['b_is']}" if sample["b_is"] else ""
        lines += ["", f"{sample['tokens']} tokens, {sample['predictions']} predicted{b_is}", f"  {sample['text']}"]
    return "\n".join(lines)
