"""Report of a finished preparation: the table of the text read, dropped and used, and warnings about the corpus."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bert_jax.data.corpora import tfds_corpus
from bert_jax.data.dataset import Counts, DatasetInfo, sum_splits
from bert_jax.data.preparation.shards import RULES
from bert_jax.files.text_files import text_format

log = logging.getLogger(__name__)

USED_SHARE = 0.95
"""Share of the read tokens that are in instances; below it, a warning says why."""

_FEWEST_DOCUMENTS = 4  # of which two are held out
_SHORT_DOCUMENT = 6  # sentences; paragraphs of prose have 1 to 6, 3.0 on average, articles of Wikipedia 15 to 21
_DOCUMENTS_PER_FILE = 50
_FEWEST_PAIRS = 200
_FEWEST_RANDOM = 16  # pairs, if all are random
_SAME_DOCUMENT_SHARE = 0.01  # of random second segments
_RANDOM_SHARE = {"paper": 0.65, "reference": 0.75}  # expected: 0.5, and 0.5 to 0.61


def text_counts(info: DatasetInfo) -> dict[str, Any]:
    """Returns the amounts of text read, dropped by each filter, cut, and used in instances, as JSON."""
    splits = info.splits.values()
    used = sum(split.used_tokens for split in splits)
    return {
        "read": asdict(info.corpus),
        "dropped": {rule: asdict(counts) for rule, counts in info.dropped.items() if counts != Counts()},
        "cut_tokens": sum(split.tokens for split in splits) - used,
        "used_tokens": used,
        "used_share": used / max(1, info.corpus.tokens),
    }


def describe(info: DatasetInfo) -> dict[str, Any]:
    """Returns the counts to show after preparation: those of `text_counts` and of each split, as JSON."""
    shown = ("documents", "sentences", "tokens", "instances")
    return text_counts(info) | {
        name: {
            **{count: getattr(split, count) for count in shown},
            "random_next_share": round(split.random_next / max(1, split.instances), 4),
        }
        for name, split in info.splits.items()
    }


def render_text(counts: Mapping[str, Any]) -> list[str]:
    """Formats the counts of `text_counts` as lines of a table."""
    units = ("documents", "sentences", "tokens")
    rows = {"read": counts["read"]}
    rows |= {f"dropped: {rule.replace('_', ' ')}": dropped for rule, dropped in counts["dropped"].items()}
    rows |= {"cut": {"tokens": counts["cut_tokens"]}, "in instances": {"tokens": counts["used_tokens"]}}
    total = max(1, counts["read"]["tokens"])
    lines = [" " * 28 + "".join(f"{unit:>16}" for unit in (*units, "share"))]
    for name, row in rows.items():
        cells = [f"{row[unit]:,}" if unit in row else "" for unit in units]
        lines.append(f"{name:<28}" + "".join(f"{cell:>16}" for cell in (*cells, f"{row['tokens'] / total:.1%}")))
    return lines


def render(info: DatasetInfo) -> list[str]:
    """Formats the counts of a dataset as lines for a terminal."""
    lines = render_text(text_counts(info))
    for name, split in info.splits.items():
        labels = (
            f", {split.random_next / split.instances:.1%} with a random second segment" if split.random_next else ""
        )
        lines.append(f"{name}: {split.documents:,} documents, {split.instances:,} instances{labels}")
    return lines


def warn(info: DatasetInfo, files: Sequence[str]) -> None:
    """Logs what is unusual about a dataset, each once: text that is lost, the eval split, and the labels of pairs."""
    for message in (*_split_problems(info), *_lost_text(info), *_pair_problems(info, files)):
        log.warning("%s", message)


def _split_problems(info: DatasetInfo) -> Iterator[str]:
    total, held_out = sum_splits(info.splits.values()), info.splits["eval"]
    has_pairs, fraction = info.options["pairs"] == "nsp", info.options["eval_fraction"]
    if has_pairs and total.documents == 1:
        yield (
            "The corpus is one document: it has no eval split, and random second segments are of the same document; "
            "separate documents by blank lines, or pass --pairs none"
        )
        return
    has_lines = held_out.documents and not has_pairs
    if fraction and not has_lines and (total.documents < _FEWEST_DOCUMENTS or held_out.documents < 2):
        yield (
            f"The eval split has {'one' if held_out.documents else 'no'} document: the filters keep "
            f"{total.documents:,} of {info.corpus.documents:,}; provide more, or pass --eval_fraction 0"
        )
    if total.same_document > _SAME_DOCUMENT_SHARE * total.random_next:
        yield (
            f"{total.same_document:,} of {total.random_next:,} random second segments are of the document of the first "
            "segment: its shard has few documents; provide more, or a larger --bucket_tokens"
        )


def _lost_text(info: DatasetInfo) -> Iterator[str]:
    counts = text_counts(info)
    if counts["used_share"] >= USED_SHARE:
        return
    causes = {"": counts["cut_tokens"], **{rule: lost["tokens"] for rule, lost in counts["dropped"].items()}}
    rule = max(causes, key=lambda name: causes[name])
    cause = (
        f"of --{RULES[rule]}={info.options[RULES[rule]]}; check this limit"
        if rule
        else f"pairs longer than --seq_len={info.seq_len} are cut; pass a larger one, --dupe_factor "
        f"{info.options['dupe_factor'] + 1} or more, whose passes cut others, or --pairs none, which cuts nothing"
    )
    share = causes[rule] / max(1, info.corpus.tokens)
    yield f"{1 - counts['used_share']:.1%} of the tokens are in no instance, {share:.1%} because {cause}"


def _pair_problems(info: DatasetInfo, files: Sequence[str]) -> Iterator[str]:
    """Yields a message if paragraphs seem to be taken for documents, and one if too many pairs are random."""
    if info.options["pairs"] != "nsp":
        return
    total, split = sum_splits(info.splits.values()), info.splits["train"]
    mean = total.sentences / max(1, total.documents)
    is_text = not tfds_corpus.is_tfds(files[0]) and text_format(files[0]) == "text"
    are_short = total.documents >= _DOCUMENTS_PER_FILE * len(files) and mean < _SHORT_DOCUMENT
    if info.options["documents"] == "blank_line" and are_short and is_text:
        yield (
            f"{total.documents:,} documents in {len(files):,} file(s) have {mean:.1f} sentences on average: blank "
            "lines seem to separate paragraphs; pass --documents file if each file is a document, such as a book"
        )
    rule, share = info.options["random_next"], split.random_next / max(1, split.instances)
    if split.instances >= (_FEWEST_RANDOM if share == 1 else _FEWEST_PAIRS) and share > _RANDOM_SHARE[rule]:
        yield (
            f"{share:.0%} of the sentence pairs have a random second segment, with --random_next={rule}: documents of "
            "one sentence have no next one; pass --documents file if each file is a document, or --pairs none"
        )
