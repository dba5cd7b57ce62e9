"""Report of a finished preparation: the table of the text read, dropped and used, and warnings about the corpus."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.data.corpora import pydoc_corpus, tfds_corpus
from bert_jax.data.dataset import Counts, DatasetInfo
from bert_jax.errors import InputError
from bert_jax.files.text_files import text_format

log = logging.getLogger(__name__)

USED_SHARE = 0.95
"""Share of the read tokens that are in instances; below it, a warning says why."""

_SAME_DOCUMENT_SHARE = 0.01  # of random second segments
_SHORT_DOCUMENT = 6  # sentences; paragraphs of prose have 1 to 6, 3.0 on average, articles of Wikipedia 15 to 21
_DOCUMENTS_PER_FILE = 50
_SAMPLED_FILES = 8
_FEWEST_PAIRS = 200
_FEWEST_RANDOM = 16  # pairs, if all are random
_RANDOM_SHARE = {"paper": 0.65, "reference": 0.75}  # expected: 0.5, and 0.5 to 0.61


def text_counts(info: DatasetInfo) -> dict[str, Any]:
    """Returns the amounts of text read, dropped by each filter, cut, and used in instances, as JSON."""
    splits = info.splits.values()
    tokens, used = (sum(getattr(split, name) for split in splits) for name in ("tokens", "used_tokens"))
    return {
        "read": _as_json(info.read),
        "dropped": {rule: _as_json(counts) for rule, counts in info.dropped.items() if counts != Counts()},
        "cut_tokens": tokens - used,
        "used_tokens": used,
        "used_share": used / max(1, info.read.tokens),
    }


def _as_json(counts: Counts) -> dict[str, int]:
    return {"documents": counts.documents, "sentences": counts.sentences, "tokens": counts.tokens}


def describe(info: DatasetInfo) -> dict[str, Any]:
    """Returns the counts to show after preparation: those of the text and of each split, as JSON."""
    return text_counts(info) | {
        name: {
            "documents": split.documents,
            "sentences": split.sentences,
            "tokens": split.tokens,
            "instances": split.instances,
            "random_next_share": round(split.random_next / max(1, split.instances), 4),
        }
        for name, split in info.splits.items()
    }


def render(report: Mapping[str, Any]) -> list[str]:
    """Formats the counts of `text_counts` as lines of a table."""
    read, total = report["read"], max(1, report["read"]["tokens"])
    rows = [("read", read["documents"], read["sentences"], read["tokens"])]
    rows += [
        (f"dropped: {rule.replace('_', ' ')}", counts["documents"], counts["sentences"], counts["tokens"])
        for rule, counts in report["dropped"].items()
    ]
    rows += [("cut from instances", None, None, report["cut_tokens"]), ("in instances", None, None, report["used_tokens"])]
    cells = [("", "documents", "sentences", "tokens", "share")]
    cells += [(name, *("" if n is None else f"{n:,}" for n in counts), f"{counts[2] / total:.1%}") for name, *counts in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]


def warn(info: DatasetInfo, files: Sequence[str]) -> None:
    """Logs what is unusual about a dataset: text that is lost, its eval split, and the labels of its pairs."""
    splits, options = info.splits, info.options
    documents = sum(split.documents for split in splits.values())
    if documents == 1:
        log.warning("The corpus is one document, so that no split and no random segment is of another one%s", _SEPARATE)
    held_out = splits["eval"].documents
    if options["eval_fraction"] and held_out < 2 and not (options["pairs"] == "none" and held_out):
        dropped = sum(counts.documents for counts in info.dropped.values())
        log.warning(
            "The eval split has %s (%s of %s in the corpus; filters dropped %s); provide more documents or a larger "
            "--eval_fraction than %s, or pass --eval_fraction 0",
            "one document" if held_out else "no document",
            f"{documents:,}",
            f"{info.read.documents:,}",
            f"{dropped:,}",
            options["eval_fraction"],
        )
    _warn_of_lost_text(info)
    if options["pairs"] == "nsp":
        if options["documents"] == "blank_line":
            _warn_of_short_documents(files, info)
        _warn_of_random_pairs(info)


_SEPARATE = "; separate documents by blank lines, or pass --pairs none"


def _warn_of_lost_text(info: DatasetInfo) -> None:
    report = text_counts(info)
    if report["used_share"] >= USED_SHARE:
        return
    reasons = [(counts["tokens"], f"filter of {rule.replace('_', ' ')}") for rule, counts in report["dropped"].items()]
    reasons.append((report["cut_tokens"], "pairs cut to --seq_len"))
    tokens, reason = max(reasons)
    way_out = (
        f"pass a --seq_len of more than {info.seq_len}, --dupe_factor of more than {info.options['dupe_factor']}, whose "
        "passes cut other tokens, or --pairs none, which cuts nothing"
        if reason == reasons[-1][1]
        else "check the limits of the filters"
    )
    log.warning(
        "%.1f%% of the tokens are in no instance, %.1f%% because of the %s; %s",
        100 * (1 - report["used_share"]),
        100 * tokens / max(1, info.read.tokens),
        reason,
        way_out,
    )


def _warn_of_short_documents(files: Sequence[str], info: DatasetInfo) -> None:
    """Logs a warning if splitting plain text at blank lines gave many documents of few sentences."""
    documents = sum(split.documents for split in info.splits.values())
    mean = sum(split.sentences for split in info.splits.values()) / max(1, documents)
    if documents < _DOCUMENTS_PER_FILE * len(files) or mean >= _SHORT_DOCUMENT or not _are_plain_text(files):
        return
    log.warning(
        "%s documents in %s file(s) have %.1f sentences on average: blank lines seem to separate paragraphs, and no "
        "sentence pair crosses them. If each file is a document, such as a book, pass --documents file; otherwise keep "
        "blank lines only between documents",
        f"{documents:,}",
        f"{len(files):,}",
        mean,
    )


def _warn_of_random_pairs(info: DatasetInfo) -> None:
    """Logs a warning if far more pairs have a random second segment than expected, or have it from their document."""
    same, random_next = (
        sum(getattr(split, name) for split in info.splits.values()) for name in ("same_document", "random_next")
    )
    if same > _SAME_DOCUMENT_SHARE * random_next:
        log.warning(
            "%s of %s random second segments are of the document of the first segment, because their shard has no "
            "other document, or few%s or use a larger --bucket_tokens",
            f"{same:,}",
            f"{random_next:,}",
            _SEPARATE.replace(", or", ","),
        )
    split, rule = info.splits["train"], info.options["random_next"]
    share = split.random_next / max(1, split.instances)
    fewest = _FEWEST_RANDOM if share == 1 else _FEWEST_PAIRS
    if split.instances < fewest or share <= _RANDOM_SHARE[rule]:
        return
    log.warning(
        "%.0f%% of the sentence pairs have a random second segment (expected for --random_next=%s: %s). Documents of "
        "one sentence have no next sentence, so next-sentence prediction learns little. If each file is a document, "
        "pass --documents file; for a corpus of single sentences, pass --pairs none",
        100 * share,
        rule,
        "50%" if rule == "paper" else "50-61%",
    )


def _are_plain_text(files: Sequence[str]) -> bool:
    """Returns True if most of a sample of files are plain text, whose documents only blank lines separate."""
    sample = files[:: -(-len(files) // _SAMPLED_FILES)]
    try:
        found = [
            not pydoc_corpus.is_pydoc(path) and not tfds_corpus.is_tfds(path) and text_format(path) == "text"
            for path in sample
        ]
    except InputError:  # A file deleted since it was read does not affect the finished dataset.
        return False
    return 2 * sum(found) > len(found)
