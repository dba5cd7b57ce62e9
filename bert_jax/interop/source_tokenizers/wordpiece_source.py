"""Import of the WordPiece tokenizer of a Hugging Face folder: its vocabulary, lowercasing and other rules.

Most such tokenizers follow the `tokenizers` library: a word of more than 100 characters is [UNK], and a final sigma is
lowercased like any other sigma. An imported tokenizer keeps these rules and produces the same ids as its source.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.interop.weight_files import read_json
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.vocabulary_extension import UNUSED
from bert_jax.text.wordpiece import CONTINUATION, TokenizerRules, WordPieceTokenizer

log = logging.getLogger(__name__)

VOCABULARY, TOKENIZER, SETTINGS = "vocab.txt", "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"

_LIBRARY_MAX_WORD_CHARACTERS = 100
_FLAGS = (
    "do_lower_case", "lowercase", "strip_accents", "do_basic_tokenize", "tokenize_chinese_chars",
    "handle_chinese_chars", "clean_text",
)  # fmt: skip
_SPECIAL = {f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS}  # {"pad_token": "[PAD]", ...}


def read_tokenizer(folder: epath.Path, *, lowercase: bool | None = None) -> WordPieceTokenizer:
    """Reads `vocab.txt`, `tokenizer.json`, or both. `lowercase` overrides the setting of the files.

    The two files may differ in pieces that replace `[unusedN]`, of an edited vocabulary: the words are read.

    Raises InputError if both files are missing, if they contradict each other, if the case is unknown, and for a
    tokenizer that differs from BERT's, such as by added tokens.
    """
    settings, special = (
        read_json(folder / name) if (folder / name).exists() else {} for name in (SETTINGS, SPECIAL_TOKENS_MAP)
    )
    _check_special_tokens(folder / SETTINGS, settings)
    _check_special_tokens(folder / SPECIAL_TOKENS_MAP, special)
    stated = {f"do_lower_case in {SETTINGS}": settings.get("do_lower_case")}
    pieces = None
    rules = TokenizerRules(_LIBRARY_MAX_WORD_CHARACTERS, "library")  # the rules of BertTokenizer for a vocab.txt
    if (folder / TOKENIZER).exists():
        described = read_json(folder / TOKENIZER)
        normalizer = _normalizer(folder / TOKENIZER, described)
        rules = _rules(folder / TOKENIZER, described, normalizer.get("text_rules", "library"))
        pieces = _pieces(folder / TOKENIZER, described)
        stated[f"normalizer.lowercase in {TOKENIZER}"] = normalizer.get("lowercase")
    else:
        normalizer = {}
        _check_added_files(folder, settings)
        if not (folder / VOCABULARY).exists():
            raise InputError(f"{folder}: found neither {VOCABULARY} nor {TOKENIZER}; add the tokenizer's files")
        if settings.get("tokenizer_class") not in (None, "BertTokenizer", "BertTokenizerFast"):
            raise InputError(
                f"{folder / SETTINGS}: tokenizer_class={settings['tokenizer_class']!r}: expected BertTokenizer"
            )
    _check_flags(folder / SETTINGS, settings)
    _check_flags(folder / TOKENIZER, normalizer)
    if lowercase is None:
        lowercase = _case(folder, stated)
    _check_options(folder / SETTINGS, settings, rules)
    _check_options(folder / TOKENIZER, normalizer, rules)
    rules = replace(rules, strip_accents=_strip_accents(folder, settings, normalizer))
    if not (folder / VOCABULARY).exists():
        try:
            return WordPieceTokenizer(pieces or [], lowercase, rules)
        except InputError as error:
            raise InputError(f"{folder / TOKENIZER}: {error}") from error
    tokenizer = WordPieceTokenizer.from_file(str(folder / VOCABULARY), lowercase, rules)
    if pieces is None or tuple(pieces) == tokenizer.vocab:
        return tokenizer
    return WordPieceTokenizer(_edited(folder, tokenizer.vocab, pieces), lowercase, rules)


def _edited(folder: epath.Path, vocabulary: Sequence[str], pieces: Sequence[str]) -> list[str]:
    """Returns the pieces of both files, one of which has words in the place of `[unusedN]`."""
    both = list(zip(vocabulary, pieces, strict=False))
    others = [(a, b) for a, b in both if a != b and not (UNUSED.fullmatch(a) or UNUSED.fullmatch(b))]
    if others or len(vocabulary) != len(pieces):
        raise InputError(f"{folder}: the vocabularies in {VOCABULARY} and {TOKENIZER} differ; delete the wrong one")
    edited = [b if UNUSED.fullmatch(a) else a for a, b in both]
    words = [piece for piece, a, b in zip(edited, vocabulary, pieces, strict=True) if a != b]
    log.info("%s: %d pieces replace [unused] ones, such as %s", folder, len(words), ", ".join(words[:3]))
    return edited


def _case(folder: epath.Path, stated: dict[str, Any]) -> bool:
    known = {where: value for where, value in stated.items() if isinstance(value, bool)}
    if len(set(known.values())) == 1:
        return next(iter(known.values()))
    if known:
        conflict = ", ".join(f"{where} is {value}" for where, value in known.items())
        raise InputError(f"{folder}: contradictory case: {conflict}; give --cased or --uncased to `bert-jax import`")
    raise InputError(
        f"{folder}: unknown case, found no {' or '.join(stated)}; give --cased or --uncased to `bert-jax import`"
    )


def _normalizer(path: epath.Path, described: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of its BertNormalizer, or the equivalent of a normalizer written by `save_huggingface`.

    The latter has the key `text_rules` of `TokenizerRules`.
    """
    for text, lowercase, strip_accents in product(("reference", "pretokenized"), (True, False), (None, True, False)):
        tokenizer = WordPieceTokenizer(
            SPECIAL_TOKENS, lowercase, TokenizerRules(text=text, strip_accents=strip_accents)
        )
        ours = json.loads(tokenizer.fast_tokenizer.to_str())
        if all(described.get(part) == ours[part] for part in ("normalizer", "pre_tokenizer")):
            return {"lowercase": lowercase, "strip_accents": strip_accents, "text_rules": text}
    _part(path, described, "pre_tokenizer", "BertPreTokenizer")
    return _part(path, described, "normalizer", "BertNormalizer")


def _rules(path: epath.Path, described: dict[str, Any], text: str) -> TokenizerRules:
    limit = _model(path, described).get("max_input_chars_per_word", _LIBRARY_MAX_WORD_CHARACTERS)
    if type(limit) is not int or limit < 1:
        raise InputError(f"{path}: model.max_input_chars_per_word={limit!r:.60}: expected an integer of at least 1")
    return TokenizerRules(limit, text)


def _model(path: epath.Path, described: dict[str, Any]) -> dict[str, Any]:
    """Returns the WordPiece model. Files of `tokenizers` before 0.9 have no type, and an option of WordPiece alone."""
    model = described.get("model")
    if isinstance(model, dict) and "type" not in model and "max_input_chars_per_word" in model:
        return model
    return _part(path, described, "model", "WordPiece")


def _part(path: epath.Path, described: dict[str, Any], name: str, wanted: str) -> dict[str, Any]:
    """Returns an object of tokenizer.json. InputError if it is not an object, or of another type than `wanted`."""
    part = described.get(name)
    kind = part.get("type") if isinstance(part, dict) else part
    if not isinstance(part, dict) or kind != wanted:
        raise InputError(f"{path}: {name}.type={kind!r:.60}: expected {wanted}")
    return part


def _pieces(path: epath.Path, described: dict[str, Any]) -> list[str]:
    """Returns the vocabulary of its WordPiece model, in the order of the ids."""
    model = _model(path, described)
    for option, value in (("continuing_subword_prefix", CONTINUATION), ("unk_token", "[UNK]")):
        if model.get(option, value) != value:
            raise InputError(f"{path}: model.{option}={model[option]!r}: expected {value!r}")
    vocab = model.get("vocab")
    if (
        not isinstance(vocab, dict)
        or not all(type(number) is int for number in vocab.values())
        or sorted(vocab.values()) != list(range(len(vocab)))
    ):
        raise InputError(f"{path}: model.vocab: expected ids from 0 without gaps")
    added = described.get("added_tokens") or []
    if not isinstance(added, list) or not all(_text_of(token) is not None for token in added):
        raise InputError(f"{path}: added_tokens: expected a list of tokens, each with content and id")
    _check_added(f"{path}: added_tokens", [token["content"] for token in added])
    for token in added:
        if vocab.get(token["content"]) != token.get("id"):
            raise InputError(f"{path}: added_tokens: {token['content']!r} is not in model.vocab with its id")
    return sorted(vocab, key=vocab.__getitem__)


def _check_added_files(folder: epath.Path, settings: dict[str, Any]) -> None:
    """Checks the added tokens of a tokenizer without `tokenizer.json`, as transformers 4 saved them."""
    listed = settings.get("added_tokens_decoder")
    if isinstance(listed, dict):
        _check_added(f"{folder / SETTINGS}: added_tokens_decoder", [str(_text_of(token)) for token in listed.values()])
    if (folder / ADDED_TOKENS).exists():
        _check_added(str(folder / ADDED_TOKENS), list(read_json(folder / ADDED_TOKENS)))


def _check_added(where: str, tokens: Sequence[str]) -> None:
    """Raises InputError for a token that a tokenizer matches in text before it splits words.

    BERT's special tokens are never matched in plain text here, and an `[unusedN]` occurs in none.
    """
    if found := [token for token in tokens if token not in SPECIAL_TOKENS and not UNUSED.fullmatch(token)]:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise InputError(
            f"{where}: {found[0]!r}{more}: added tokens are matched before words are split, which is not supported; "
            "replace [unused] pieces of the vocabulary instead"
        )


def _text_of(token: Any) -> str | None:
    """Returns the content of a token object; None for anything else."""
    content = token.get("content") if isinstance(token, dict) else None
    return content if isinstance(content, str) else None


def _check_special_tokens(path: epath.Path, settings: dict[str, Any]) -> None:
    for name, wanted in _SPECIAL.items():
        token = settings.get(name)
        if token is not None and wanted not in (token, _text_of(token)):
            raise InputError(f"{path}: {name}={(_text_of(token) or token)!r:.60}: expected {wanted}")


def _check_flags(path: epath.Path, options: dict[str, Any]) -> None:
    for name in _FLAGS:
        if not isinstance(options.get(name), (bool, type(None))):
            raise InputError(f"{path}: {name}={options[name]!r:.60}: expected true or false")


def _strip_accents(folder: epath.Path, settings: dict[str, Any], normalizer: dict[str, Any]) -> bool | None:
    """Returns the setting of both files; None if accents follow the case."""
    stated = {value for value in (settings.get("strip_accents"), normalizer.get("strip_accents")) if value is not None}
    if len(stated) > 1:
        raise InputError(
            f"{folder}: contradictory strip_accents: {settings['strip_accents']} in {SETTINGS}, "
            f"{normalizer['strip_accents']} in {TOKENIZER}; correct one of them"
        )
    return stated.pop() if stated else None


def _check_options(path: epath.Path, options: dict[str, Any], rules: TokenizerRules) -> None:
    for name in ("tokenize_chinese_chars", "handle_chinese_chars", "clean_text", "do_basic_tokenize"):
        if options.get(name) is False and rules.text != "pretokenized":
            raise InputError(f"{path}: {name}=False is not supported; expected True")
    if options.get("never_split"):
        raise InputError(f"{path}: never_split={options['never_split']!r:.60} is not supported; expected none")
