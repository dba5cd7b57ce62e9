"""Options of `vocab` and `prepare`, each declared once; `dataset.json` records the same fields."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bert_jax.errors import InputError
from bert_jax.sections import CheckedOptions, option
from bert_jax.text.sentences import check_language

TEXT_FIELD = "text"
"""Default of `--text_field`."""
_NOT_RECORDED = ("text_field", "ids_field", "allow_unk")
_OF_TEXT = ("text_field", "documents", "errors", "sentences", "language")


@dataclass(frozen=True)
class CorpusOptions(CheckedOptions):
    """Options for reading documents from files, which `vocab` and `prepare` share.

    Tables and JSON lines mark their documents themselves. Documents of plain text of more than `max_document_bytes` are
    split at line ends.
    """

    documents: str = option(
        "blank_line",
        "document separator in plain text: a blank line, or the end of the file (for text with blank lines)",
        choices=("blank_line", "file"),
    )
    errors: str = option(
        "strict", "how to read invalid UTF-8: fail, or replace it by U+FFFD", choices=("strict", "replace")
    )
    text_field: str = option(
        TEXT_FIELD,
        "field or column with the text, in JSON lines, Parquet, Arrow, CSV, TSV and TFDS; a dot for a nested field",
        metavar="NAME",
    )
    max_document_bytes: int = dataclasses.field(default=16 << 20, metadata={"low": 1})


@dataclass(frozen=True)
class PrepareOptions(CorpusOptions):
    """Options that, with corpus, vocabulary and seed, determine the bytes of a dataset.

    Filters drop duplicates first, then lines that are repeated in what remains.
    """

    seq_len: int = option(128, "tokens per sequence, special tokens included", low=8, high=1 << 15)
    pairs: str = option(
        "nsp",
        "nsp: sentence pairs; none: one segment of complete sentences, for a corpus without documents",
        choices=("nsp", "none"),
    )
    dupe_factor: int = option(1, "passes over the corpus, each with new pairs", low=1, high=1000)
    short_seq_prob: float = option(
        0.1, "share of documents, with --pairs none of sequences, with a shorter target", low=0, high=1
    )
    eval_fraction: float = option(0.01, "share of documents held out for evaluation")
    sentences: str = option("split", "split lines into sentences, or one a line", choices=("split", "lines"))
    language: str = option("en", "ISO 639-1 code (en, de, ko, ...), for splitting sentences")
    drop_duplicates: bool = option(False, "drop duplicate documents (same text)")
    max_line_repeats: int = option(
        0, "drop lines that occur more than N times in the corpus; 0: off", low=0, metavar="N"
    )
    ids_field: str = option(
        "",
        "column of Parquet or Arrow with token ids in place of text: lists of ids, or sentences that are lists of ids",
        metavar="NAME",
    )
    # Released vocabularies have shares below 0.005 on text that they were trained for.
    allow_unk: float = option(0.2, "maximum share of [UNK] tokens before failing", low=0, high=1, metavar="SHARE")
    bucket_tokens: int = option(16 << 20, "tokens per shard, the unit in a worker's memory", low=1024)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.eval_fraction < 1:
            raise InputError(f"eval_fraction={self.eval_fraction}: must be in [0, 1)")
        check_language(self.language)
        if self.ids_field:
            used = {field.name for field in dataclasses.fields(self)} - {*_OF_TEXT}
            self.check_unused(used, f"with ids_field={self.ids_field}; remove it")

    @property
    def needs_lines(self) -> bool:
        """True if lines are counted, or may be held out."""
        return self.max_line_repeats > 0 or (self.pairs == "none" and self.eval_fraction > 0)

    def as_recorded(self) -> dict[str, Any]:
        """Returns the options of the command line, as `dataset.json` records them.

        Those that say where a format has the text are not among them: equal texts give equal bytes.
        """
        recorded = [field.name for field in dataclasses.fields(self) if "help" in field.metadata]
        return {name: getattr(self, name) for name in recorded if name not in _NOT_RECORDED}
