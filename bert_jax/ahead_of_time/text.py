"""Renders plans of runs and descriptions of compiled steps as text: the keys of their JSON, with units."""

from collections.abc import Mapping, Sequence
from typing import Any

_SCALES: dict[str, dict[str, float]] = {
    "bytes": {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "bytes": 1},
    "seconds": {"s": 1, "ms": 1e-3, "us": 1e-6},
    "hours": {"hours": 1, "minutes": 1 / 60, "seconds": 1 / 3600},
    "share": {"%": 0.01},
    "mfu": {"%": 0.01},
}
"""Units, the largest first, by the last word of a key."""


def render(record: Mapping[str, Any], indent: str = "") -> str:
    """Renders a record: a line for each key, then a block for each record and a table for each list of records in it.

    Skips keys without a value (None).
    """
    blocks = {key: value for key, value in record.items() if _is_block(value)}
    plain = {key: value for key, value in record.items() if value is not None and key not in blocks}
    width = max(map(len, plain), default=0)
    lines = [f"{indent}{key:<{width}}  {_text(value, key)}" for key, value in plain.items()]
    for key, value in blocks.items():
        rows = [value] if isinstance(value, Mapping) else value
        if rows[0] is value or any(map(_is_block, rows[0].values())):
            lines += [f"\n{indent}{key}\n{render(row, indent + '  ')}" for row in rows]
        else:
            lines += ["", f"{indent}{key}", *_table(rows, f"{indent}  ")]
    return "\n".join(lines)


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(v, Mapping) for v in value))


def _table(rows: Sequence[Mapping[str, Any]], indent: str) -> list[str]:
    texts = [list(rows[0]), *([_text(value, key) for key, value in row.items()] for row in rows)]
    columns = [
        [text.rjust(width) if isinstance(value, int | float) else text.ljust(width) for text in column]
        for column, value in zip(zip(*texts, strict=True), rows[0].values(), strict=True)
        for width in [max(map(len, column))]
    ]
    return [f"{indent}{'  '.join(row)}".rstrip() for row in zip(*columns, strict=True)]


def _text(value: Any, key: str = "") -> str:
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "?"}[value]
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value)) or "none"
    if not isinstance(value, int | float):
        return str(value) or "-"
    if scales := _SCALES.get(key.rpartition("_")[2]):
        unit = next((unit for unit, size in scales.items() if value >= size), list(scales)[-1])
        return f"{value / scales[unit]:,.2f} {unit}"
    return f"{value:,.0f}" if isinstance(value, int) or 100 <= value < 1e15 else f"{value:.4g}"
