"""Options of `bert-jax vocab`, each declared once."""

from typing import Annotated, Literal, get_args

from bert_jax.sections import Must, Section

Kind = Literal["wordpiece", "unigram", "bpe", "byte_bpe"]
KINDS = get_args(Kind)

COVERAGE = 0.99995
"""The share of the text's characters that pieces cover, from the most frequent down.

A word with any other character is [UNK]. Without the limit, rare characters fill the vocabulary: with 1.0, half of
8,192 pieces trained on English Wikipedia are characters like U+10CC0.
"""

MAX_PIECES = 1 << 22
"""Maximum pieces of a vocabulary to train: the trainers allocate memory for all before they count a word."""


class VocabularyOptions(Section):
    """Options that, with a corpus, determine a vocabulary; the first ones are rules for text.

    Args:
      cased: keep case and accents
      keep_accents: keep accents in lower-cased text; Korean, Japanese, Hindi, Thai, ... need it with --kind=wordpiece
      kind: wordpiece, as BERT; unigram or bpe, whose pieces have the space before a word, as for text without spaces,
        such as Thai; byte_bpe, as RoBERTa and ModernBERT, which has a piece for every byte and no [UNK]
      size: maximum number of pieces, special tokens included
    """

    cased: bool = False
    keep_accents: bool = False
    kind: Kind = "wordpiece"
    size: Annotated[int, Must(f"in [1, {MAX_PIECES}]", lambda x: 1 <= x <= MAX_PIECES)] = 30522

    @property
    def strip_accents(self) -> bool:
        """True if accents are stripped."""
        return not (self.cased or self.keep_accents)
