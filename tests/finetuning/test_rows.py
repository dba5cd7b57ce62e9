"""Rows of a task's files: bad ones, and ids."""

from pathlib import Path

import pytest

from bert_jax.errors import InputError
from bert_jax.finetuning.task import BadRows, read_rows, row_id


def test_bad_rows_are_counted_by_reason_and_logged_with_their_place(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "a.csv"
    path.write_bytes(b"text,label\na,1\nb\n" + b"c\n" * 9 + b'"two\nlines",2\n')
    bad_rows = BadRows()

    def example(row: dict, number: int) -> tuple[int, str]:
        return number, row["text"]

    assert read_rows(str(path), bad_rows, example, "a text") == [(1, "a"), (12, "two\nlines")]
    assert bad_rows.counts == {str(path): 10}
    assert [line.split(": ")[1] for line in caplog.messages[:-1]] == [f"{path}:{line}" for line in range(3, 8)]
    assert "10" in caplog.messages[-1]
    with pytest.raises(InputError, match=rf"{path}:3: .*\b2\b.*\b1\b"):
        read_rows(str(path), BadRows(strict=True), example, "a text")


@pytest.mark.parametrize(
    ("row", "identity"),
    [({"text": "a", "guid": "g7"}, "g7"), ({"index": "0", "id": "q"}, "q"), ({"idx": 5}, "5"),
     ({"index": "1", "id": ""}, "1"), ({"text": "a"}, "3"), ({"": "7", "text": "a"}, "7")],
)  # fmt: skip
def test_ids_are_those_of_the_row_or_its_number(row: dict, identity: str):
    assert row_id(row, 3) == identity
