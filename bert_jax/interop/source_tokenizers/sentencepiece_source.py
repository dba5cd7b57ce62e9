"""Import of the SentencePiece tokenizer of a Hugging Face folder, from its model file.

A folder of `bert-jax export` has the normalization of this package in its `tokenizer.json`. Any other model file is
used with its own normalization: the ids are those of the `sentencepiece` library.
"""

import json
import logging
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.interop.source_tokenizers.wordpiece_source import SETTINGS, TOKENIZER, VOCABULARY
from bert_jax.interop.weight_files import read_json
from bert_jax.text import tokenizer_files
from bert_jax.text.sentencepiece.sentencepiece_tokenizer import SentencePieceTokenizer

log = logging.getLogger(__name__)

_MODEL_FILES = (
    SentencePieceTokenizer.vocabulary_file, "spiece.model", "tokenizer.model", "sentencepiece.bpe.model",
)  # fmt: skip
_COMPARED_PARTS = ("normalizer", "pre_tokenizer", "model")  # of tokenizer.json


def find_model(folder: epath.Path) -> epath.Path | None:
    """Returns the SentencePiece model of a folder; None if it has none, or a `vocab.txt`, which is read instead."""
    if (folder / VOCABULARY).exists():
        return None
    return next((folder / name for name in _MODEL_FILES if (folder / name).exists()), None)


def read_tokenizer(folder: epath.Path, model: epath.Path, *, lowercase: bool | None) -> SentencePieceTokenizer:
    """Reads the tokenizer of a SentencePiece model.

    Raises InputError for a model that this package does not support, for settings that change text before it, and for
    a `lowercase` that the files contradict.
    """
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    described = read_json(folder / TOKENIZER) if (folder / TOKENIZER).exists() else {}
    for case in (True, False):
        for strip_accents in (True, False):
            rules = {"lowercase": case, "strip_accents": strip_accents, "normalization": "nfkc"}
            tokenizer = tokenizer_files.open_sentencepiece(str(model), rules)
            if described and _is_same(described, tokenizer):
                return _of_case(tokenizer, folder, lowercase)
    for name, supported in (("do_lower_case", False), ("keep_accents", True)):
        if settings.get(name, supported) != supported:
            raise InputError(
                f"{folder / SETTINGS}: {name}={json.dumps(settings[name])}: a SentencePiece model is supported with "
                f"its own normalization only; expected {name}={json.dumps(supported)}"
            )
    tokenizer = tokenizer_files.open_sentencepiece(str(model), None)
    log.info(
        "%s: the ids are those of the sentencepiece library for this file; %s may change quotes, accents or case first",
        model,
        settings.get("tokenizer_class") or "the source's tokenizer",
    )
    return _of_case(tokenizer, folder, lowercase)


def _is_same(described: dict[str, Any], tokenizer: SentencePieceTokenizer) -> bool:
    ours = json.loads(tokenizer.fast_tokenizer.to_str())
    return all(described.get(part) == ours[part] for part in _COMPARED_PARTS)


def _of_case(tokenizer: SentencePieceTokenizer, folder: epath.Path, lowercase: bool | None) -> SentencePieceTokenizer:
    if lowercase is not None and lowercase != tokenizer.lowercase:
        option = "--uncased" if lowercase else "--cased"
        raise InputError(f"{option}: {folder} has a SentencePiece model with another case; remove {option}")
    return tokenizer
