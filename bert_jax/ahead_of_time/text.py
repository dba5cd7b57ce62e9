"""Renders plans of runs and descriptions of compiled steps as text: the keys of their JSON, with units."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_UNIT = re.compile(r"(?:^|_)(bytes|seconds|hours|share|mfu)$")


def render(record: Mapping[str, Any], unit: str = "") -> str:
    """Renders a record: a line for each key, then a block for each record and a table for each list of records in it.

    Skips keys without a value (None). The end of a key names the unit: bytes, seconds, hours, or a share.
    """
    return "\n".join(_lines(record, unit))


def _lines(record: Mapping[str, Any], unit: str) -> Iterator[str]:
    known = {key: value for key, value in record.items() if value is not None}
    blocks = {key for key, value in known.items() if key != "mesh" and _is_block(value)}
    width = max((len(key) for key in known.keys() - blocks), default=0)
    yield from (f"{key:<{width}}  {_text(known[key], _unit(key, unit))}" for key in known if key not in blocks)
    for key in (key for key in known if key in blocks):
        rows = [known[key]] if isinstance(known[key], Mapping) else known[key]
        if rows[0] is known[key] or any(map(_is_block, rows[0].values())):
            for row in rows:
                yield from ("", key, *(f"  {line}" if line else "" for line in _lines(row, _unit(key, unit))))
        else:
            yield from ("", key, *_table(rows))


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, Sequence) and any(isinstance(v, Mapping) for v in value))


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    texts = [list(rows[0]), *([_text(value, _unit(key)) for key, value in row.items()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    numeric = [isinstance(value, int | float) for value in rows[0].values()]
    for row in texts:
        cells = zip(row, widths, numeric, strict=True)
        yield "  " + "  ".join(cell.rjust(n) if right else cell.ljust(n) for cell, n, right in cells).rstrip()


def _unit(key: str, otherwise: str = "") -> str:
    return unit[1] if (unit := _UNIT.search(key)) else otherwise


def _text(value: Any, unit: str = "") -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={size}" for key, size in value.items())
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "?"}[value]
    if isinstance(value, list | tuple):
        return (" - " if value and isinstance(value[0], int) else " ").join(map(_text, value)) or "none"
    if not isinstance(value, int | float):
        return str(value) or "-"
    match unit:
        case "bytes":
            return f"{value / (1 << 30):,.2f} GiB" if value >= 1 << 30 else f"{value / (1 << 20):,.2f} MiB"
        case "seconds":
            return f"{1e3 * value:,.2f} ms" if value < 5 else f"{value:,.1f} s"
        case "hours":
            return f"{value:,.1f} hours" if value >= 1 else f"{60 * value:,.2f} minutes"
        case "share" | "mfu":
            return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if 100 <= value < 1e9 else f"{value:.4g}"
