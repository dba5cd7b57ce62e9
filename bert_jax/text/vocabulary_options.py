"""Options of `bert-jax vocab`, each declared once."""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.errors import InputError
from bert_jax.sections import CheckedOptions, option

KINDS = ("wordpiece", "unigram", "bpe", "byte_bpe")

COVERAGE = 0.99995
"""The share of the text's characters that pieces cover, from the most frequent down.

A word with any other character is [UNK]. Without the limit, rare characters fill the vocabulary: with 1.0, half of
8,192 pieces trained on English Wikipedia are characters like U+10CC0.
"""

MAX_PIECES = 1 << 22
"""Maximum pieces of a vocabulary to train: the trainers allocate memory for all before they count a word."""


@dataclass(frozen=True)
class VocabularyOptions(CheckedOptions):
    """Options that, with a corpus, determine a vocabulary; the first ones are rules for text."""

    cased: bool = option(False, "keep case and accents")
    keep_accents: bool = option(
        False, "keep accents in lower-cased text; Korean, Japanese, Hindi, Thai, ... need it with --kind=wordpiece"
    )

    kind: str = option(
        "wordpiece",
        "wordpiece, as BERT; unigram or bpe, whose pieces have the space before a word, as for text without spaces, "
        "such as Thai; byte_bpe, as RoBERTa and ModernBERT, which has a piece for every byte and no [UNK]",
        choices=KINDS,
    )
    size: int = option(30522, "maximum number of pieces, special tokens included", low=1, high=MAX_PIECES)

    @property
    def strip_accents(self) -> bool:
        """True if accents are stripped."""
        return not (self.cased or self.keep_accents)


def check_vocab_options(inputs: Sequence[str] | None, source: str | None, training: VocabularyOptions) -> None:
    """Raises InputError for options of `vocab` that have no effect together, or for a missing one."""
    if bool(inputs) == bool(source):
        raise InputError(f"from={source}: has no effect with --input" if source else "expected --input, or --from FILE")
    if source:
        training.check_unused(("cased", "keep_accents"), f"with from={source}; remove it")
