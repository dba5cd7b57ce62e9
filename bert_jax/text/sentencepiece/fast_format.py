"""SentencePiece tokenizers in the format of `tokenizers`, which `transformers` reads (`tokenizer.json`).

A tokenizer of `bert-jax vocab` has the same steps there: the same normalization, and the same pieces and scores. A word
with two splits of equal probability, such as `w ww` and `ww w`, may be split differently by a unigram model there.

A model of another source has a table of normalized strings. `tokenizers` looks up graphemes of less than 6 bytes and
else single characters; SentencePiece looks up the longest string of the table. So the two differ on sequences such as
decomposed Hangul. `differing_characters` finds the single characters.
"""

from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from bert_jax.text.sentencepiece import model_proto, text_normalizers
from bert_jax.text.tokenizer import add_special_tokens

if TYPE_CHECKING:
    from bert_jax.text.sentencepiece.sentencepiece_tokenizer import SentencePieceTokenizer


def build(tokenizer: "SentencePieceTokenizer", model: bytes) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a model file in the format of `tokenizers`."""
    proto = model_proto.parse(model)
    fast = tokenizers.Tokenizer(_unigram(tokenizer, proto) if tokenizer.model_type == "unigram" else _bpe(tokenizer))
    fast.normalizer = _normalizer(tokenizer, proto)
    # A space mark is put before the text alone: after a special token in it, the text has its own spaces.
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    fast.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    add_special_tokens(fast, tokenizer)
    return fast


def differing_characters(tokenizer: "SentencePieceTokenizer") -> list[str]:
    """Returns the characters of Unicode, between letters, that the exported tokenizer normalizes differently.

    Takes seconds for a model of another source; the normalization of this package has none.
    """
    if tokenizer.normalization == "nfkc":
        return []
    fast = tokenizer.fast_tokenizer.normalizer
    characters = (chr(code) for code in range(0x110000) if not 0xD800 <= code <= 0xDFFF)
    return [
        character
        for character in characters
        if fast.normalize_str(f"a{character}b") != tokenizer.normalize(f"a{character}b")
    ]


def user_defined_symbols(tokenizer: "SentencePieceTokenizer", model: bytes) -> list[str]:
    """Returns the pieces that SentencePiece never splits and `tokenizers` may, without the special tokens."""
    pieces = model_proto.parse(model).pieces
    found = [piece.piece for piece in pieces if piece.type == model_proto.USER_DEFINED]
    return [piece for piece in found if piece not in tokenizer.special_tokens]


def _normalizer(tokenizer: "SentencePieceTokenizer", proto: Any) -> normalizers.Normalizer:
    if tokenizer.normalization == "nfkc":
        return text_normalizers.steps(tokenizer.lowercase, tokenizer.strip_accents)
    steps: list[normalizers.Normalizer] = []
    if proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    return normalizers.Sequence(
        [*steps, normalizers.Replace(Regex("[ ▁]+"), " "), normalizers.Replace(Regex(" $"), "")]
    )


def _unigram(tokenizer: "SentencePieceTokenizer", proto: Any) -> models.Model:
    vocab = [(piece.piece, piece.score) for piece in proto.pieces]
    return models.Unigram(vocab, unk_id=tokenizer.unk_id, byte_fallback=False)


def _bpe(tokenizer: "SentencePieceTokenizer") -> models.Model:
    """Returns the BPE model; a piece is the result of every pair of pieces that forms it, earlier pieces first."""
    ids = {piece: index for index, piece in enumerate(tokenizer.vocab)}
    special = set(tokenizer.special_tokens)
    merges = []
    for piece in tokenizer.vocab:
        if piece not in special:
            cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
            merges += sorted(
                (cut for cut in cuts if cut[0] in ids and cut[1] in ids), key=lambda cut: (ids[cut[0]], ids[cut[1]])
            )
    return models.BPE(ids, merges, unk_token=tokenizer.special_tokens[1], fuse_unk=True, byte_fallback=False)
