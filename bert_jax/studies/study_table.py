"""The table of a study, as Markdown and JSON, with the paper's numbers next to ours."""

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from etils import epath

from bert_jax.files import atomic
from bert_jax.files.atomic import write_json

TABLE_VERSION = 1
"""The format of `table.json`."""
PERPLEXITY = "perplexity"
"""The name of the perplexity column."""
_DIGITS = {PERPLEXITY: 2}  # decimals shown; 1 for all other columns


@dataclass(frozen=True)
class Cell:
    """The scores of one row in one column: one value per restart (seed)."""

    values: Sequence[float]
    seeds: Sequence[str] = ()
    learning_rate: float | None = None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The standard deviation over restarts; None for a single restart."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def as_json(self) -> dict[str, Any]:
        """Returns mean, median, best, spread and every score."""
        return {
            "mean": self.mean, "deviation": self.deviation, "median": statistics.median(self.values),
            "best": max(self.values), "spread": max(self.values) - min(self.values), "values": list(self.values),
            "seeds": list(self.seeds), "learning_rate": self.learning_rate,
        }  # fmt: skip


@dataclass
class Table:
    """The results of a study so far; `cells` and `paper` are by row and column.

    `pretraining_seeds` has the seed of each pre-training that a row rests on: none for an encoder that is trained from
    scratch, None if a given checkpoint does not record it.
    """

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    paper: dict[str, dict[str, float]] = field(default_factory=dict)
    pretraining: dict[str, dict[str, Any]] = field(default_factory=dict)
    pretraining_seeds: dict[str, Sequence[int | None]] = field(default_factory=dict)

    def score(self, row: str, column: str) -> tuple[float, float | None] | None:
        """Returns mean and standard deviation of a cell; None without one."""
        cell = self.cells.get((row, column))
        return (cell.mean, cell.deviation) if cell else None

    def difference(self, row: str, column: str) -> tuple[float, float | None] | None:
        """Returns the difference of the row's mean to the first row's, and its standard error.

        None if either is missing; the error is None if either has a single restart.
        """
        ours, first = self.cells.get((row, column)), self.cells.get((self.rows[0], column))
        if ours is None or first is None:
            return None
        error = None
        if ours.deviation is not None and first.deviation is not None:
            error = math.hypot(*(cell.deviation / math.sqrt(len(cell.values)) for cell in (ours, first)))  # type: ignore
        return ours.mean - first.mean, error

    def paper_number(self, row: str, column: str) -> float | None:
        """Returns the paper's number; None if it has none."""
        return self.paper.get(row, {}).get(column)

    def paper_difference(self, row: str, column: str) -> float | None:
        """Returns the difference of the paper's number to that of the first row; None if either is missing."""
        theirs, first = self.paper_number(row, column), self.paper_number(self.rows[0], column)
        return None if theirs is None or first is None else theirs - first

    def as_json(self) -> dict[str, Any]:
        """Returns version, title, note, columns and `rows`; a cell has our scores, the paper's and the differences."""
        rows = []
        for row in self.rows:
            columns = {}
            for column in self.columns:
                cell, difference = self.cells.get((row, column)), self.difference(row, column)
                columns[column] = {
                    **(cell.as_json() if cell else {}),
                    "paper": self.paper_number(row, column),
                    "difference": difference and difference[0],
                    "difference_error": difference and difference[1],
                    "paper_difference": self.paper_difference(row, column),
                }
            seeds = self.pretraining_seeds.get(row)
            rows.append({
                "name": row, "pretraining": self.pretraining.get(row),
                "pretraining_seeds": seeds if seeds is None else list(seeds), "columns": columns,
            })  # fmt: skip
        return {
            "format_version": TABLE_VERSION, "title": self.title, "note": self.note, "columns": list(self.columns),
            "rows": rows,
        }  # fmt: skip


def write_table(table: Table, folder: epath.Path) -> None:
    """Writes `table.md` and `table.json` into the folder."""
    atomic.write_whole(folder / "table.md", render(table).encode())
    write_json(folder / "table.json", table.as_json())


def render(table: Table) -> str:
    """Renders the table as Markdown: means, standard deviations, and differences to the first row."""
    parts = [f"# {table.title}" if table.title else "# Study"]
    if restarts := {len(cell.values) for cell in table.cells.values() if cell.seeds}:
        parts.append(
            f"Mean ± standard deviation over {_count(restarts, 'restart')} of fine-tuning, at the learning rate with "
            "the best median."
        )
    if pretrained := {len(seeds) for seeds in table.pretraining_seeds.values() if seeds}:
        parts.append(
            f"Each row rests on {_count(pretrained, 'pre-training seed')}: no deviation or standard error here "
            "includes the variation between pre-training runs."
        )
    if table.note:
        parts.append(table.note)
    parts.append(_scores(table, table.rows, table.score, table.paper_number))
    others = table.rows[1:]
    if any(table.difference(row, column) for row in others for column in table.columns):
        parts.append(f"## Difference to {table.rows[0]}, ± its standard error")
        parts.append(_scores(table, others, table.difference, table.paper_difference, "+"))
    if table.pretraining:
        parts.append("## Pre-training, on held-out text")
        parts.append(_pretraining(table))
    return "\n\n".join(parts) + "\n"


def _count(counts: Collection[int], noun: str) -> str:
    """Returns the least and the greatest count with its noun, such as "1 to 5 restarts"."""
    span = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    return f"{span} {noun}{'s' if max(counts) > 1 else ''}"


def _scores(
    table: Table, rows: Sequence[str], ours: Callable[[str, str], tuple[float, float | None] | None],
    paper: Callable[[str, str], float | None], sign: str = "",
) -> str:  # fmt: skip
    """Renders rows by columns; a column with numbers in the paper is followed by a column of these."""
    heads, lines = [""], [[row] for row in rows]
    for column in table.columns:
        digits = _DIGITS.get(column, 1)
        has_paper = any(table.paper_number(row, column) is not None for row in table.rows)
        heads += [column, "paper"] if has_paper else [column]
        for line in lines:
            pair, number = ours(line[0], column), paper(line[0], column)
            value, error = pair or (None, None)
            text = "" if value is None else f"{value:{sign}.{digits}f}"
            line.append(text if error is None else f"{text} ± {error:.{digits}f}")
            if has_paper:
                line.append("" if number is None else f"{number:{sign}.{digits}f}")
    return _markdown(heads, lines)


def _pretraining(table: Table) -> str:
    known = ("steps", "mlm_loss", "mlm_accuracy", "nsp_accuracy", "unigram_loss")
    names = [name for name in known if any(name in values for values in table.pretraining.values())]
    lines = []
    for row, values in table.pretraining.items():
        shown = [
            f"{values[name]:,}" if name == "steps" else f"{values[name]:.3f}" if name in values else ""
            for name in names
        ]
        lines.append([row, *shown])
    return _markdown(["", *names], lines)


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in cells)
