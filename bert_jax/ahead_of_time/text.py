"""Renders plans of runs and descriptions of compiled steps as text: the keys of their JSON, with units."""

from collections.abc import Mapping, Sequence
from typing import Any

_UNITS = {
    "bytes": ("GiB", 1 << 30), "seconds": ("s", 1), "hours": ("hours", 1), "share": ("%", 0.01), "mfu": ("%", 0.01)
}  # fmt: skip
"""Units by the last word of a key."""


def render(record: Mapping[str, Any], indent: str = "") -> str:
    """Renders a record: a line for each key, then a block for each record and a table for each list of records in it.

    Skips keys without a value (None).
    """
    plain = {key: value for key, value in record.items() if value is not None and not _is_block(value)}
    width = max(map(len, plain), default=0)
    lines = [f"{indent}{key:<{width}}  {_text(value, key)}" for key, value in plain.items()]
    for key, value in record.items():
        if _is_block(value):
            rows = [value] if isinstance(value, Mapping) else value
            is_table = rows is value and not any(map(_is_block, rows[0].values()))
            parts = _table(rows, f"{indent}  ") if is_table else [render(row, f"{indent}  ") for row in rows]
            lines += [f"\n{indent}{key}", *parts]
    return "\n".join(lines)


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(v, Mapping) for v in value))


def _table(rows: Sequence[Mapping[str, Any]], indent: str) -> list[str]:
    texts = [list(rows[0]), *([_text(value, key) for key, value in row.items()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return [indent + "  ".join(map(str.ljust, row, widths)).rstrip() for row in texts]


def _text(value: Any, key: str = "") -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value)) or "none"
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "?"}[value]
    if not isinstance(value, int | float):
        return str(value) or "-"
    unit, size = _UNITS.get(key.rpartition("_")[2], ("", 1))
    number = value / size if unit else value
    text = f"{number:,.0f}" if isinstance(number, int) or 100 <= number < 1e15 else f"{number:.4g}"
    return f"{text} {unit}".rstrip()
