"""Options of reading a corpus, which `vocab` and `prepare` share."""

import dataclasses
from dataclasses import dataclass

from bert_jax.sections import CheckedOptions, option

TEXT_FIELD = "text"
"""Default of `--text_field`."""


@dataclass(frozen=True)
class CorpusOptions(CheckedOptions):
    """Options for reading documents from files.

    Tables, JSON lines and WikiExtractor files mark their documents themselves. Documents of plain text of more than
    `max_document_bytes` are split at line ends.
    """

    documents: str = option(
        "blank_line",
        "document separator in plain text: a blank line, or the end of the file (for text with blank lines)",
        choices=("blank_line", "file"),
    )
    errors: str = option(
        "strict", "how to read invalid UTF-8: fail, or replace it by U+FFFD", choices=("strict", "replace")
    )
    tsv_quotes: bool = option(False, "fields of TSV may be in double quotes, as in CSV; else a quote is text")
    text_field: str = option(
        TEXT_FIELD,
        "field or column with the text, in JSON lines, Parquet, Arrow, CSV, TSV and TFDS; a dot for a nested field",
        metavar="NAME",
    )
    max_document_bytes: int = dataclasses.field(default=16 << 20, metadata={"low": 1})
