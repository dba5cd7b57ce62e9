"""Options of `vocab` and `prepare`, each declared once; `dataset.json` records the same fields."""

from typing import Annotated, Any, Literal

from bert_jax.config_keys import NotNegative, Positive, Share, ShareBelow1
from bert_jax.sections import Must, Section, flatten, kinds
from bert_jax.text.sentences import check_language

TEXT_FIELD = "text"
"""Default of `--text_field`."""
_NOT_RECORDED = ("text_field", "ids_field", "allow_unk", "max_document_bytes")


class CorpusOptions(Section):
    """Options for reading documents from files, which `vocab` and `prepare` share.

    Tables and JSON lines mark their documents themselves. Documents of plain text of more than `max_document_bytes` are
    split at line ends.

    Args:
      documents: document separator in plain text: a blank line, or the end of the file (for text with blank lines)
      errors: how to read invalid UTF-8: fail, or replace it by U+FFFD
      text_field: field or column with the text, in JSON lines, Parquet, Arrow, CSV, TSV and TFDS; a dot for a nested
        field
    """

    documents: Literal["blank_line", "file"] = "blank_line"
    errors: Literal["strict", "replace"] = "strict"
    text_field: str = TEXT_FIELD
    max_document_bytes: Positive = 16 << 20


class PrepareOptions(CorpusOptions):
    """Options that, with corpus, vocabulary and seed, determine the bytes of a dataset.

    Filters drop duplicates first, then lines that are repeated in what remains.

    Args:
      seq_len: tokens per sequence, special tokens included
      pairs: nsp: sentence pairs, half of them random; sop: consecutive segments, half of them swapped; none: one
        segment of complete sentences, for a corpus without documents
      dupe_factor: passes over the corpus, each with new pairs
      short_seq_prob: share of documents, with --pairs none of sequences, with a shorter target
      eval_fraction: share of documents held out for evaluation
      sentences: split lines into sentences, or one a line
      language: ISO 639-1 code (en, de, ko, ...), for splitting sentences
      drop_duplicates: drop duplicate documents (same text)
      max_line_repeats: drop lines that occur more than this often in the corpus; 0: off
      ids_field: column of Parquet or Arrow with token ids in place of text: lists of ids, or sentences that are lists
        of ids
      allow_unk: maximum share of [UNK] tokens before failing
      bucket_tokens: tokens per shard, the unit in a worker's memory
    """

    seq_len: Annotated[int, Must(f"in [8, {1 << 15}]", lambda x: 8 <= x <= 1 << 15)] = 128
    pairs: Literal["nsp", "sop", "none"] = "nsp"
    dupe_factor: Annotated[int, Must("in [1, 1000]", lambda x: 1 <= x <= 1000)] = 1
    short_seq_prob: Share = 0.1
    eval_fraction: ShareBelow1 = 0.01
    sentences: Literal["split", "lines"] = "split"
    language: str = "en"
    drop_duplicates: bool = False
    max_line_repeats: NotNegative = 0
    ids_field: str = ""
    allow_unk: Share = 0.2  # Released vocabularies have shares below 0.005 on text that they were trained for.
    bucket_tokens: Annotated[int, Must("in [1024, 2**30]", lambda x: 1024 <= x <= 1 << 30)] = 16 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_language(self.language)
        if self.ids_field:
            of_text = {"text_field", "documents", "errors", "sentences", "language"}
            self.check_unused(kinds(PrepareOptions).keys() - of_text, "with ids_field; remove it")

    @property
    def needs_lines(self) -> bool:
        """True if lines are counted, or may be held out."""
        return self.max_line_repeats > 0 or (self.pairs == "none" and self.eval_fraction > 0)

    def as_recorded(self) -> dict[str, Any]:
        """Returns the options as `dataset.json` records them.

        Those that say how files are read are not among them: equal texts give equal bytes.
        """
        return {name: value for name, value in flatten(self) if name not in _NOT_RECORDED}
