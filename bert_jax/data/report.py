"""Report of `prepare` and `inspect` on a dataset: counts of its text, warnings, lengths, and some masked instances."""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from bert_jax.batch import map_arrays
from bert_jax.data.dataset import Counts, DatasetInfo, PreparedDataset, SplitInfo
from bert_jax.data.loading.loader import TrainRows
from bert_jax.data.loading.masking import Masking
from bert_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

USED_SHARE = 0.95
"""Share of the read tokens that are in instances; below it, a warning says why."""

_FEWEST_PAIRS = 16
_RANDOM_SHARE = 0.8  # of pairs; half are expected
_SAME_DOCUMENT_SHARE = 0.01  # of random second segments
_UNITS = ("documents", "sentences", "tokens")


def describe(info: DatasetInfo) -> dict[str, Any]:
    """Returns the amounts of text read, dropped by each filter, cut and used, and the counts of each split, as JSON."""
    total = sum(info.splits.values(), SplitInfo())
    return {
        "read": asdict(info.corpus),
        "dropped": {rule: asdict(counts) for rule, counts in info.dropped.items() if counts != Counts()},
        "cut_tokens": total.tokens - total.used_tokens,
        "used_tokens": total.used_tokens,
        "used_share": total.used_tokens / max(1, info.corpus.tokens),
        **{
            name: {
                **{count: getattr(split, count) for count in (*_UNITS, "instances")},
                "random_next_share": round(split.random_next / max(1, split.instances), 4),
            }
            for name, split in info.splits.items()
        },
    }


def inspect_dataset(path: str, *, samples: int = 3, seed: int = 0) -> dict[str, Any]:
    """Returns the report of `bert-jax inspect`: that of `describe`, and what a phase will read.

    Args:
      path: the dataset's folder.
      samples: the number of training instances to decode; `seed` selects them and their masks.
      seed: of samples and masks.

    Raises:
      InputError: the dataset was not found or is damaged.
    """
    dataset = PreparedDataset(path)
    info, counts = dataset.info, dataset.token_counts()
    found = describe(info)
    for name, split in info.splits.items():
        mean = float(dataset.lengths(name).mean()) if split.instances else np.nan  # null in JSON
        found[name] |= {"shards": len(split.shards), "mean_length": mean, "padding_share": 1 - mean / info.seq_len}
    count = min(samples, dataset.size("train"))
    batch = TrainRows(dataset, seed=seed, masking=Masking()).rows(np.arange(count)) if count else {}
    return {
        "path": path,
        "hash": info.hash,
        "seq_len": info.seq_len,
        "pairs": info.options["pairs"],
        "tokenizer": dict(info.tokenizer),
        "unk_rate": float(counts[dataset.tokenizer.unk_id] / max(1, counts.sum())),
        **found,
        "samples": [
            describe_sequence(dataset.tokenizer, map_arrays(lambda array, row=row: array[row], batch))
            for row in range(count)
        ],
    }


def describe_sequence(
    tokenizer: Tokenizer, row: Mapping[str, Any], number: int = 1, *, left_to_right: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Shows the pieces of sequence `number` in a row, from 1; a masked position is {original>input}.

    `predictions` has the position in the sequence, the target and the input of each; and its loss and the most probable
    piece if the row has `best_ids` and `mlm_loss`, or `ltr_loss`. Those of a `left_to_right` row are not masked: each
    position predicts the next piece. `random_next` is the label of a pair, in SOP whether it is swapped; None for a
    single segment.
    """
    columns, names = np.flatnonzero(row["sequence_ids"] == number), tokenizer.vocab
    pieces = [names[token] for token in row["input_ids"][columns].tolist()]
    shown, predictions, losses = pieces.copy(), [], row.get("ltr_loss" if left_to_right else "mlm_loss")
    is_inside = row["sequence_ids"][row["masked_positions"]] == number
    for slot in np.flatnonzero(is_inside & (row["masked_weights"] > 0)).tolist():
        position, target = int(row["masked_positions"][slot] - columns[0]), names[int(row["masked_ids"][slot])]
        predictions.append({"position": position, "target": target, "input": pieces[position]})
        if losses is not None:
            predictions[-1] |= {"loss": float(losses[slot]), "best": names[int(row["best_ids"][slot])]}
        if not left_to_right:
            shown[position] = f"{{{target}>{pieces[position]}}}"
    is_random = bool(row["next_sentence_labels"][number - 1]) if row["next_sentence_weights"][number - 1] else None
    return {"text": " ".join(shown), "random_next": is_random, "predictions": predictions}


def render_sequence(sample: Mapping[str, Any]) -> str:
    """Formats the text of `describe_sequence`."""
    b_is = {None: "", False: "B is next: ", True: "B is not next: "}[sample["random_next"]]
    return f"{b_is}{sample['text']}"


def render(report: Mapping[str, Any]) -> list[str]:
    """Formats the report of `describe` or `inspect_dataset` as lines for a terminal."""
    lines = []
    if "path" in report:
        case = "uncased" if report["tokenizer"]["lowercase"] else "cased"
        lines = [
            f"{report['path']}: sequences of {report['seq_len']} tokens, pairs {report['pairs']}, "
            f"{report['tokenizer']['vocab_size']:,} pieces, {case}; [UNK] {report['unk_rate']:.3%} of tokens",
            "",
        ]
    rows = {"read": report["read"]}
    rows |= {f"dropped: {rule.replace('_', ' ')}": dropped for rule, dropped in report["dropped"].items()}
    rows |= {"cut": {"tokens": report["cut_tokens"]}, "in instances": {"tokens": report["used_tokens"]}}
    lines.append(" " * 28 + "".join(f"{unit:>16}" for unit in (*_UNITS, "share")))
    for name, row in rows.items():
        share = f"{row['tokens'] / max(1, report['read']['tokens']):.1%}"
        cells = [f"{row[unit]:,}" if unit in row else "" for unit in _UNITS]
        lines.append(f"{name:<28}" + "".join(f"{cell:>16}" for cell in (*cells, share)))
    for name in ("train", "eval"):
        split = report[name]
        share = split["random_next_share"]
        labels = f", {share:.1%} with a random second segment" if share else ""
        lines.append(f"{name}: {split['documents']:,} documents, {split['instances']:,} instances{labels}")
        if split.get("shards"):
            lines.append(
                f"  shards: {split['shards']:,}; {split['mean_length']:.1f} tokens per sequence, "
                f"padding {split['padding_share']:.1%}"
            )
    for sample in report.get("samples", ()):
        lines += ["", render_sequence(sample)]
    return lines


def warn(info: DatasetInfo) -> None:
    """Logs what is unusual about a dataset, each once: text that is lost, the eval split, and the labels of pairs."""
    total, held_out, counts = sum(info.splits.values(), SplitInfo()), info.splits["eval"], describe(info)
    share = total.random_next / max(1, total.instances)
    causes = {"pairs longer than --seq_len are cut, as are lone sentences with --pairs sop": counts["cut_tokens"]}
    causes |= {f"of the filter of {rule.replace('_', ' ')}": lost["tokens"] for rule, lost in counts["dropped"].items()}
    problems = [
        (
            info.options["eval_fraction"]
            and min(held_out.documents, held_out.instances) < (2 if info.options["pairs"] == "nsp" else 1),
            f"The eval split has {held_out.documents} document(s) with {held_out.instances} instance(s): the filters "
            f"keep {total.documents:,} of {info.corpus.documents:,}; provide more, or pass --eval_fraction 0",
        ),
        (
            total.same_document > _SAME_DOCUMENT_SHARE * total.random_next,
            f"{total.same_document:,} of {total.random_next:,} random second segments are of the document of the first "
            "segment: its shard has few documents; separate them by blank lines, provide more, or a larger "
            "--bucket_tokens, or pass --pairs none",
        ),
        (
            counts["used_share"] < USED_SHARE,
            f"{1 - counts['used_share']:.1%} of the tokens are in no instance, most because "
            f"{max(causes, key=causes.__getitem__)}; pass a larger --seq_len, --dupe_factor 2 or more, whose passes "
            "cut others, --pairs none, which cuts nothing, or other filters",
        ),
        (
            total.instances >= _FEWEST_PAIRS and share > _RANDOM_SHARE,
            f"{share:.0%} of the sentence pairs have a random second segment: documents of one sentence have no next "
            "one; pass --documents file if each file is a document, or --pairs none",
        ),
    ]
    for holds, problem in problems:
        if holds:
            log.warning("%s", problem)
