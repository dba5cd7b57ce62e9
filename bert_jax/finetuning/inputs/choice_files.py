"""The right ending among several: SWAG, CODAH, and files of one's own.

    .csv     SWAG: train.csv, val.csv and test.csv of https://github.com/rowanz/swagaf, with the columns `sent1`,
             `sent2`, `ending0` to `ending3` and (but in test.csv) `label`, counted from 0; others are not needed
    .tsv     CODAH: category, prompt, four endings and the right one's number, counted from 0; no header, no quoting
    .jsonl   one's own: objects with `context`, `endings` (a list of two or more, as many in every object), `label` (a
             number from 0) and, if need be, `start` (the begin of every ending) and `id`

each also as .gz, .bz2 or .zst. The encoder reads one sequence an ending: the context, then the start and the ending.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.bad_rows import MISSING_LABEL, UNKNOWN_LABEL, BadLabel, BadRows
from bert_jax.finetuning.inputs.tables import columns_of, csv_rows, json_rows, tsv_rows, write_lines
from bert_jax.finetuning.inputs.text_files import format_of
from bert_jax.text.examples import encode_pairs
from bert_jax.text.sequences import EncodedSequence
from bert_jax.text.tokenization import WordPieceTokenizer

_ENDINGS = ("ending0", "ending1", "ending2", "ending3")
_SWAG = ("sent1", "sent2", *_ENDINGS)
_CODAH = ("category", "context", *_ENDINGS, "label")


@dataclass(frozen=True)
class ChoiceExample:
    """`endings` go on from `start`, which follows `context`; `label` is the right one's number, from 0, if known."""

    id: str
    context: str
    start: str
    endings: tuple[str, ...]
    label: int | None


Labels = Literal["required", "optional", "ignored"]


def read_choices(path: str | PathLike[str], bad_rows: BadRows, *, labels: Labels = "required") -> list[ChoiceExample]:
    """The examples of a file in one of the formats above, in its order.

    Args:
      path: the file; its ending says which format it is.
      bad_rows: gets rows with a wrong number of columns or endings, an empty context or ending, or a label that is
        not the number of an ending.
      labels: "optional" where they may be missing, as in SWAG's test.csv; "ignored" where no label is looked at.

    Raises:
      InputError: an unknown format, a file that cannot be read, no such columns in it, or no usable row.
    """
    examples: list[ChoiceExample] = []
    for line, identity, row in _rows(str(path), bad_rows, labels):
        try:
            example = _example(identity, row, labels)
            if examples and len(example.endings) != len(examples[0].endings):
                raise ValueError(f"{len(example.endings)} endings instead of {len(examples[0].endings)}")
        except ValueError as error:
            bad_rows.add(path, line, error)
        else:
            examples.append(example)
    if not examples:
        raise InputError(f"{path}: no usable row")
    return examples


def encode_choices(
    tokenizer: WordPieceTokenizer, examples: Sequence[ChoiceExample], max_seq_len: int
) -> list[tuple[EncodedSequence, ...]]:
    """For each example one sequence an ending: [CLS] context [SEP] start ending [SEP], cut to `max_seq_len`."""
    pairs = [
        (example.context, f"{example.start} {ending}".strip()) for example in examples for ending in example.endings
    ]
    sequences = iter(encode_pairs(tokenizer, pairs, max_seq_len))
    return [tuple(next(sequences) for _ in example.endings) for example in examples]


def write_choices(path: str | PathLike[str], examples: Sequence[ChoiceExample], predictions: Sequence[int]) -> None:
    """Writes the numbers of the chosen endings as SWAG's leaderboard takes them (`csv_predict.py` of rowanz/swagaf)."""
    rows = (f"{example.id},{int(choice)}" for example, choice in zip(examples, predictions, strict=True))
    write_lines(path, [",pred", *rows])


def _rows(path: str, bad_rows: BadRows, labels: Labels) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """(line, id, row) with `context`, `start`, `endings` and, where the file has one, `label`."""
    kind = format_of(path)
    if kind == ".csv":
        columns = columns_of(path, comma=True)
        if missing := [name for name in (*_SWAG, *(("label",) if labels == "required" else ())) if name not in columns]:
            raise InputError(f"{path}:1: no column {', '.join(missing)}; is this a file of SWAG's?")
        for number, (line, row) in enumerate(csv_rows(path, bad_rows)):
            endings = [row[name] for name in _ENDINGS]
            label = {"label": row["label"]} if row.get("label") else {}
            # The first column has no name: it is the row's number.
            yield line, row.get("") or str(number), {
                "context": row["sent1"], "start": row["sent2"], "endings": endings, **label,
            }  # fmt: skip
    elif kind == ".tsv":
        is_unlabelled = labels == "ignored" and len(columns_of(path)) == len(_CODAH) - 1
        for line, row in tsv_rows(path, bad_rows, _CODAH[:-1] if is_unlabelled else _CODAH):
            endings = [row[name] for name in _ENDINGS]
            yield line, str(line - 1), {"context": row["context"], "endings": endings, "label": row.get("label")}
    elif kind in (".jsonl", ".json"):
        for line, value in json_rows(path, bad_rows):
            yield line, str(value.get("id", line - 1)), value
    else:
        raise InputError(f"{path}: the name has to end in .csv (SWAG), .tsv (CODAH) or .jsonl")


def _example(identity: str, row: Mapping[str, Any], labels: Labels) -> ChoiceExample:
    """Raises ValueError that says what is wrong."""
    context, start, endings = row.get("context"), row.get("start") or "", row.get("endings")
    if not isinstance(context, str) or not isinstance(start, str):
        raise ValueError("context and start have to be texts")
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(ending, str) for ending in endings):
        raise ValueError("endings have to be a list of two texts or more")
    if not context.strip():
        raise ValueError("the context is empty")
    if empty := [number for number, ending in enumerate(endings) if not ending.strip()]:
        raise ValueError(f"ending {empty[0]} is empty")
    label = row.get("label") if labels != "ignored" else None
    if label is None:
        if labels == "required":
            raise BadLabel("no label", MISSING_LABEL)
        return ChoiceExample(identity, context, start, tuple(endings), None)
    if str(label) not in map(str, range(len(endings))):
        raise BadLabel(f"the label {label!r:.60} is not one of 0 to {len(endings) - 1}", UNKNOWN_LABEL)
    return ChoiceExample(identity, context, start, tuple(endings), int(label))
