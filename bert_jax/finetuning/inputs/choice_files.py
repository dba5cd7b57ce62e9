"""Multiple-choice files: SWAG, CODAH, and the user's own.

    .csv     SWAG: train.csv, val.csv and test.csv of https://github.com/rowanz/swagaf, with the columns `sent1`,
             `sent2`, `ending0` to `ending3` and (except in test.csv) `label`, numbered from 0; others are ignored
    .tsv     CODAH: category, prompt, four endings and the correct one's number, from 0; no header, no quoting
    .jsonl   the user's own: objects with `context`, `endings` (a list of at least two, as many in every object),
             `label` (a number from 0) and optionally `start` (the beginning of every ending) and `id`

Each may be compressed (.gz, .bz2, .xz, .zst). The encoder reads one sequence per ending: the context, then the start
and the ending.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.task_files import (
    MISSING_LABEL,
    UNKNOWN_LABEL,
    BadLabel,
    BadRows,
    columns_of,
    csv_rows,
    json_rows,
    tsv_rows,
    write_lines,
)
from bert_jax.finetuning.inputs.text_files import format_of, row_id
from bert_jax.text.sequences import EncodedSequence, encode_pairs
from bert_jax.text.tokenizer import Tokenizer

_ENDINGS = ("ending0", "ending1", "ending2", "ending3")
_SWAG = ("sent1", "sent2", *_ENDINGS)
_CODAH = ("category", "context", *_ENDINGS, "label")


@dataclass(frozen=True)
class ChoiceExample:
    """`endings` continue `start`, which follows `context`; `label` is the correct one's number, from 0, or None."""

    id: str
    context: str
    start: str
    endings: tuple[str, ...]
    label: int | None


Labels = Literal["required", "optional", "ignored"]


def read_choices(path: str | PathLike[str], bad_rows: BadRows, *, labels: Labels = "required") -> list[ChoiceExample]:
    """Reads the examples of a file in one of the formats above, in its order.

    Args:
      path: the file; its name's extension determines the format.
      bad_rows: collects rows with a wrong number of columns or endings, an empty context or ending, or a label that is
        not the number of an ending.
      labels: "optional" if they may be missing, as in SWAG's test.csv; "ignored" if labels are not read.

    Raises:
      InputError: unknown format, unreadable file, missing columns, or no usable row.
    """
    examples: list[ChoiceExample] = []
    for line, identity, row in _rows(str(path), bad_rows, labels):
        try:
            example = _example(identity, row, labels)
            if examples and len(example.endings) != len(examples[0].endings):
                raise ValueError(f"expected {len(examples[0].endings)} endings, got {len(example.endings)}")
        except ValueError as error:
            bad_rows.add(path, line, error)
        else:
            examples.append(example)
    if not examples:
        raise InputError(f"{path}: no usable row")
    return examples


def encode_choices(
    tokenizer: Tokenizer, examples: Sequence[ChoiceExample], max_seq_len: int
) -> list[tuple[EncodedSequence, ...]]:
    """Encodes one sequence per ending: [CLS] context [SEP] start ending [SEP], truncated to `max_seq_len`."""
    pairs = [
        (example.context, f"{example.start} {ending}".strip()) for example in examples for ending in example.endings
    ]
    sequences = iter(encode_pairs(tokenizer, pairs, max_seq_len))
    return [tuple(next(sequences) for _ in example.endings) for example in examples]


def write_choices(path: str | PathLike[str], examples: Sequence[ChoiceExample], predictions: Sequence[int]) -> None:
    """Writes the numbers of the chosen endings in the format of SWAG's leaderboard (rowanz/swagaf `csv_predict.py`)."""
    rows = (f"{example.id},{int(choice)}" for example, choice in zip(examples, predictions, strict=True))
    write_lines(path, [",pred", *rows])


def _rows(path: str, bad_rows: BadRows, labels: Labels) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yields (line, id, row); a row has `context`, `start`, `endings` and, if the file has one, `label`."""
    kind = format_of(path)
    if kind == ".csv":
        columns = columns_of(path, comma=True)
        if missing := [name for name in (*_SWAG, *(("label",) if labels == "required" else ())) if name not in columns]:
            raise InputError(f"{path}:1: missing column {', '.join(missing)}; expected a SWAG file")
        for number, (line, row) in enumerate(csv_rows(path, bad_rows)):
            endings = [row[name] for name in _ENDINGS]
            label = {"label": row["label"]} if row.get("label") else {}
            # The first column, which has no name, is the row's number.
            yield line, row.get("") or row_id(row) or str(number), {
                "context": row["sent1"], "start": row["sent2"], "endings": endings, **label,
            }  # fmt: skip
    elif kind == ".tsv":
        is_unlabelled = labels == "ignored" and len(columns_of(path)) == len(_CODAH) - 1
        for line, row in tsv_rows(path, bad_rows, _CODAH[:-1] if is_unlabelled else _CODAH):
            endings = [row[name] for name in _ENDINGS]
            yield line, str(line - 1), {"context": row["context"], "endings": endings, "label": row.get("label")}
    elif kind in (".jsonl", ".json"):
        for line, value in json_rows(path, bad_rows):
            yield line, row_id(value) or str(line - 1), value
    else:
        raise InputError(f"{path}: unknown format; expected a name that ends in .csv (SWAG), .tsv (CODAH) or .jsonl")


def _example(identity: str, row: Mapping[str, Any], labels: Labels) -> ChoiceExample:
    """Converts a row to an example. Raises ValueError for a bad row."""
    context, start, endings = row.get("context"), row.get("start") or "", row.get("endings")
    if not isinstance(context, str) or not isinstance(start, str):
        raise ValueError("context and start must be strings")
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(ending, str) for ending in endings):
        raise ValueError("endings must be a list of at least 2 strings")
    if not context.strip():
        raise ValueError("context is empty")
    if empty := [number for number, ending in enumerate(endings) if not ending.strip()]:
        raise ValueError(f"endings[{empty[0]}] is empty")
    label = row.get("label") if labels != "ignored" else None
    if label is None:
        if labels == "required":
            raise BadLabel("label is missing", MISSING_LABEL)
        return ChoiceExample(identity, context, start, tuple(endings), None)
    if str(label) not in map(str, range(len(endings))):
        raise BadLabel(f"label {label!r:.60}: expected 0 to {len(endings) - 1}", UNKNOWN_LABEL)
    return ChoiceExample(identity, context, start, tuple(endings), int(label))
