"""WordPiece vocabularies as tokenizers, with BERT's rules for text."""

import json
from collections.abc import Sequence

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from bert_jax.errors import InputError
from bert_jax.text.bert_rules import REFERENCE, normalizer, pre_tokenizer
from bert_jax.text.tokenizer import SPECIAL_TOKENS, Tokenizer

CONTINUATION = "##"
MAX_WORD_CHARACTERS = 200
"""Maximum length of a word; longer ones are [UNK]. (The library's default is 100.)"""

LIBRARY_MAX_WORD_CHARACTERS = 100


def wordpiece_tokenizer(
    vocab: Sequence[str], lowercase: bool, *, strip_accents: bool | None = None, text: str = REFERENCE,
    max_word_characters: int = MAX_WORD_CHARACTERS,
) -> Tokenizer:  # fmt: skip
    """Returns the tokenizer of a vocabulary, whose index is the id.

    Args:
      vocab: the pieces; those that continue a word begin with `##`.
      lowercase: whether text is lower-cased.
      strip_accents: whether accents are stripped; None if they are where text is lower-cased.
      text: `REFERENCE` or `LIBRARY` of `bert_rules.py`.
      max_word_characters: longer words are [UNK].

    Raises:
      InputError: a special token is missing, or a piece is empty, duplicate or contains a line end.
    """
    ids = {piece: index for index, piece in enumerate(vocab)}
    if missing := [token for token in SPECIAL_TOKENS if token not in ids]:
        raise InputError(f"the vocabulary lacks special tokens: {' '.join(missing)}; add a line for each")
    if len(ids) < len(vocab):
        duplicate = next(piece for index, piece in enumerate(vocab) if ids[piece] != index)
        raise InputError(f"the vocabulary has two pieces {duplicate!r}; rename one, as [unused1]: other ids stay")
    if bad := [piece for piece in vocab if not piece or "\n" in piece or "\r" in piece]:
        raise InputError(f"the vocabulary has an invalid piece {bad[0]!r}; expected text on one line")
    model = models.WordPiece(
        ids, unk_token="[UNK]", max_input_chars_per_word=max_word_characters, continuing_subword_prefix=CONTINUATION
    )
    fast = FastTokenizer(model)
    fast.normalizer = normalizer(bool(lowercase), strip_accents, text)
    fast.pre_tokenizer = pre_tokenizer(text)
    fast.decoder = decoders.WordPiece(prefix=CONTINUATION)
    return Tokenizer(json.loads(fast.to_str()))
