"""Options of `prepare`, each declared once; `dataset.json` records the same fields."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bert_jax.data.corpora.corpus_options import CorpusOptions
from bert_jax.data.preparation.instances import RANDOM_NEXT_RULES
from bert_jax.errors import InputError
from bert_jax.sections import CheckedOptions, option
from bert_jax.text.sentences import check_language

LONGEST_SEQ_LEN = 1 << 15
_READING = ("text_field", "ids_field", "tsv_quotes")
_OF_TEXT = ("text_field", "tsv_quotes", "documents", "errors", "sentences", "language")
MAX_SHARE = 0.2
"""Default of `--allow_unk`. Released vocabularies have shares below 0.005 on text that they were trained for."""


@dataclass(frozen=True)
class InstanceOptions(CheckedOptions):
    """Options for splitting documents into sentences and creating instances from them; see `instances.py`."""

    seq_len: int = option(128, "tokens per sequence, special tokens included", low=8, high=LONGEST_SEQ_LEN)
    pairs: str = option(
        "nsp",
        "nsp: sentence pairs; none: one segment of complete sentences, for a corpus without documents",
        choices=("nsp", "none"),
    )
    dupe_factor: int = option(1, "passes over the corpus, each with new pairs", low=1, high=1000)
    short_seq_prob: float = option(
        0.1, "share of documents, with --pairs none of sequences, with a shorter target", low=0, high=1
    )
    random_next: str = option(
        "paper",
        "paper: half of all pairs are random; reference: a lone sentence always gets a random B (50-61% random)",
        choices=RANDOM_NEXT_RULES,
    )
    eval_fraction: float = option(0.01, "share of documents held out for evaluation")
    sentences: str = option("split", "split lines into sentences, or one a line", choices=("split", "lines"))
    language: str = option("en", "ISO 639-1 code (en, de, ko, ...), for splitting sentences")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.eval_fraction < 1:
            raise InputError(f"eval_fraction={self.eval_fraction}: must be in [0, 1)")
        check_language(self.language)


@dataclass(frozen=True)
class PrepareOptions(CorpusOptions, InstanceOptions):
    """Options that, with corpus, vocabulary and seed, determine the bytes of a dataset.

    The first ones drop text: duplicates, then lines repeated in what remains, then documents by their length.
    """

    drop_duplicates: bool = option(False, "drop duplicate documents (same text)")
    max_line_repeats: int = option(
        0, "drop lines that occur more than N times in the corpus; 0: off", low=0, metavar="N"
    )
    min_document_tokens: int = option(0, "drop shorter documents", low=0)
    max_document_tokens: int = option(0, "drop longer documents; 0: off", low=0)
    ids_field: str = option(
        "",
        "column of Parquet or Arrow with token ids in place of text: lists of ids, or sentences that are lists of ids",
        metavar="NAME",
    )
    bucket_tokens: int = option(16 << 20, "tokens per shard, the unit in a worker's memory", low=1024)

    def __post_init__(self) -> None:
        super().__post_init__()
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
        return {name: getattr(self, name) for name in recorded if name not in _READING}
