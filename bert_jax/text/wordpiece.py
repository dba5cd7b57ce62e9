"""WordPiece vocabularies as tokenizers, with BERT's rules for text: those of BertTokenizer of `transformers`.

Text is cleaned (control characters dropped) and CJK characters are separated. For an uncased vocabulary, text is
lower-cased, and its accents are stripped unless `strip_accents` is False. Words are split at white space and
punctuation. Each word is split greedily into the longest matching pieces of the vocabulary, those after the first with
`##`. A word without a match, or longer than 100 characters, is [UNK].

`tokenization.py` of google-research/bert differs on rare characters: it keeps private characters, has the final sigma
of Greek, follows a newer version of Unicode, and allows 200 characters.
"""

import json
from collections.abc import Sequence

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from bert_jax.errors import InputError
from bert_jax.text.tokenizer import Tokenizer

CONTINUATION = "##"


def bert_tokenizer(model: models.WordPiece, *, lowercase: bool, strip_accents: bool | None = None) -> FastTokenizer:
    """Returns the library's tokenizer of a model, with BERT's rules. `strip_accents` None follows `lowercase`."""
    fast = FastTokenizer(model)
    fast.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece(prefix=CONTINUATION)
    return fast


def wordpiece_tokenizer(vocab: Sequence[str], lowercase: bool, *, strip_accents: bool | None = None) -> Tokenizer:
    """Returns the tokenizer of a vocabulary, whose index is the id.

    Args:
      vocab: the pieces; those that continue a word begin with `##`.
      lowercase: whether text is lower-cased.
      strip_accents: whether accents are stripped; None if they are where text is lower-cased.

    Raises:
      InputError: a special token is missing, or a piece is empty, duplicate or contains a line end.
    """
    ids = {piece: index for index, piece in enumerate(vocab)}
    if len(ids) < len(vocab):
        duplicate = next(piece for index, piece in enumerate(vocab) if ids[piece] != index)
        raise InputError(f"the vocabulary has two pieces {duplicate!r}; rename one, as [unused1]: other ids stay")
    if bad := [piece for piece in vocab if not piece or "\n" in piece or "\r" in piece]:
        raise InputError(f"the vocabulary has an invalid piece {bad[0]!r}; expected text on one line")
    model = models.WordPiece(ids, unk_token="[UNK]")
    return Tokenizer(json.loads(bert_tokenizer(model, lowercase=lowercase, strip_accents=strip_accents).to_str()))
