"""Validation of the fields of `dataset.json` and their types."""

import re
from typing import Any

SPLITS = ("train", "eval")
_HEX = re.compile(r"[0-9a-f]+")
_BARE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST = 1 << 62  # maximum of any count, so that the sum of two fits in int64


class FieldError(ValueError):
    """A field with an invalid type or value."""


def check_fields(content: dict[str, Any]) -> None:
    """Validates the fields; missing and unknown ones are left to the constructor of `DatasetInfo`.

    Raises FieldError, with the field, the value and what is expected, for content that `prepare` never writes.
    """
    _need(content, "tokenizer", dict)
    for name, kind in (("kind", str), ("lowercase", bool), ("sha256", str)):
        _need(content["tokenizer"], name, kind, "tokenizer.")
    _count(content["tokenizer"], "vocab_size", "tokenizer.", least=1)
    _count(content, "seq_len", least=1, most=1 << 15)
    _need(content, "seed", int)
    _need(content, "options", dict)
    if content["options"].get("pairs") not in ("nsp", "none"):
        raise FieldError(f"options.pairs: got {content['options'].get('pairs')!r}, expected 'nsp' or 'none'")
    for rule in _need(content, "dropped", dict):
        _count(content["dropped"], rule, "dropped.")
    _check_digests(content)
    splits = _need(content, "splits", dict)
    if set(splits) != set(SPLITS):
        raise FieldError(f"splits: got {', '.join(splits) or 'none'}, expected {' and '.join(SPLITS)}")
    for name in splits:
        _check_split(_need(splits, name, dict, "splits."), f"splits.{name}.")


def _check_digests(content: dict[str, Any]) -> None:
    for name in _need(content, "files", dict) if "files" in content else ():
        _check_name(name, "files")
        _check_digest(content["files"], name, "files.")


def _check_split(split: dict[str, Any], where: str) -> None:
    for name in ("documents", "sentences", "tokens", "instances", "random_next"):
        _count(split, name, where)
    for number, shard in enumerate(_need(split, "shards", list, where)):
        at = f"{where}shards[{number}]"
        if not isinstance(shard, dict):
            raise FieldError(f"{at}: got {shard!r:.40}, expected an object")
        _check_name(_need(shard, "file", str, f"{at}."), f"{at}.file")
        _check_digest(shard, "digest", f"{at}.")
        size = _count(shard, "bytes", f"{at}.")
        _count(shard, "instances", f"{at}.", most=size)  # an instance is larger than a byte
    if (total := sum(shard["instances"] for shard in split["shards"])) != split["instances"]:
        raise FieldError(f"{where}instances: got {split['instances']}, expected {total}, the sum of its shards")


def _check_name(name: str, where: str) -> None:
    """Refuses a file name with a folder in it, so that no file outside of the dataset's folder is opened."""
    if not _BARE_NAME.fullmatch(name):
        raise FieldError(f"{where}: got {name!r:.80}, expected the bare name of a file in this folder")


def _check_digest(fields: dict[str, Any], name: str, where: str) -> None:
    if not _HEX.fullmatch(_need(fields, name, str, where)):
        raise FieldError(f"{where}{name}: got {fields[name]!r:.40}, expected a digest in hex")


def _need(fields: dict[str, Any], name: str, kind: type, where: str = "") -> Any:
    value = fields[name]
    if type(value) is not kind:
        raise FieldError(f"{where}{name}: got {value!r:.40}, expected {kind.__name__}")
    return value


def _count(fields: dict[str, Any], name: str, where: str = "", *, least: int = 0, most: int = _MOST) -> int:
    value: int = _need(fields, name, int, where)
    if not least <= value <= most:
        raise FieldError(f"{where}{name}: got {value}, expected {least} to {most}")
    return value
