"""Tables read as a whole: formats, compression, rows that are bad, and files that are refused."""

import bz2
import gzip
import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from bert_jax.errors import InputError
from bert_jax.files.tables import BadRow, read_table

ROWS = [{"text": 'a "b", c', "label": "good"}, {"text": "é", "label": "bad"}]
DEEP = "[" * 100_000 + "]" * 100_000


def write_columnar(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=1)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)


CONTENT = {
    ".csv": '\ufefftext,label\n"a ""b"", c",good\né,bad\n',
    ".CSV": 'text;label\r\n"a ""b"", c";good\r\né;bad\r\n',
    ".tsv": 'text\tlabel\r\na "b", c\tgood\r\n\r\né\tbad\r\n',
    ".jsonl": "".join(f"{json.dumps(row)}\n\n" for row in ROWS),
}


@pytest.mark.parametrize("kind", CONTENT)
@pytest.mark.parametrize("compressed", ["", ".gz", ".bz2", ".zst"])
def test_formats_have_the_same_rows(tmp_path: Path, kind: str, compressed: str):
    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.ZstdCompressor().compress}
    path = tmp_path / f"train{kind}{compressed}"
    path.write_bytes(pack[compressed](CONTENT[kind].encode()))
    assert [row for _, row in read_table(str(path))] == ROWS


@pytest.mark.parametrize("kind", [".parquet", ".arrow"])
def test_columnar_files_have_the_same_rows(tmp_path: Path, kind: str):
    write_columnar(tmp_path / f"a{kind}")
    assert list(read_table(str(tmp_path / f"a{kind}"))) == [("row 1", ROWS[0]), ("row 2", ROWS[1])]


def test_a_file_without_a_header_has_the_given_columns(tmp_path: Path):
    (tmp_path / "a.tsv").write_text('x\t"1\n')
    assert list(read_table(str(tmp_path / "a.tsv"), ("a", "b"))) == [(1, {"a": "x", "b": '"1'})]


def test_a_line_of_tsv_is_a_row_whatever_it_holds(tmp_path: Path):
    (tmp_path / "a.tsv").write_bytes(b"text\tlabel\na\rb\t1\n\xff\t1\n\nc\t0\n")
    (first, row), (second, bad), (last, end) = read_table(str(tmp_path / "a.tsv"))
    assert (first, row, last, end) == (2, {"text": "a\rb", "label": "1"}, 5, {"text": "c", "label": "0"})
    assert (second, bad.is_rest) == (3, False)
    assert "UTF-8" in bad.problem


def places(path: Path) -> list[tuple[int | str, object]]:
    return [(place, row if isinstance(row, BadRow) else row["text"]) for place, row in read_table(str(path))]


@pytest.mark.parametrize(
    ("kind", "bad", "problem"),
    [
        (".csv", b"a,b,c", r"\b2\b.*\b3\b"), (".tsv", b"a", r"\b2\b.*\b1\b"),
        (".jsonl", b"[1]", "list"), (".jsonl", b"{", "JSON"), (".jsonl", DEEP.encode(), "JSON"),
        (".jsonl", b'{"text": ' + b"9" * 5_000 + b"}", "JSON"), (".jsonl", rb'{"text": "\ud83d x"}', "UTF-8.*0xed"),
        (".jsonl", rb'{"\ud800": 1, "text": "a"}', "UTF-8.*0xed"),
    ],
)  # fmt: skip
def test_bad_row_is_whole_and_in_its_place(tmp_path: Path, kind: str, bad: bytes, problem: str):
    good = {".csv": b"a,1", ".tsv": b"a\t1", ".jsonl": b'{"text": "a"}'}[kind]
    header = {".csv": b"text,label", ".tsv": b"text\tlabel", ".jsonl": good}[kind]
    path = tmp_path / f"a{kind}"
    path.write_bytes(b"\n".join([header, good, bad, good]) + b"\n")
    (_, row), (last, _) = places(path)[-2:]
    assert isinstance(row, BadRow)
    assert re.search(problem, row.problem)
    assert last == 4 + bad.count(b"\n")


def test_a_quoted_field_may_hold_lines_and_be_a_book(tmp_path: Path):
    lines, book = "\n".join(f"{n}, and, so" for n in range(30_000)), "word " * 100_000
    (tmp_path / "a.csv").write_text(f'text,label\n"one\n\ntwo",x\n"{lines}",1\n"{book}",b\nend,0\n')
    assert places(tmp_path / "a.csv") == [(2, "one\n\ntwo"), (5, lines), (30_005, book), (30_006, "end")]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("rows", "line"), [('"a\nb",1\n"never closed,0\n' + "text,1\n" * 30_000, 4), ('nice film","1\n' * 12_000, 2)]
)
def test_a_quote_that_is_never_closed_is_refused_with_its_line(tmp_path: Path, rows: str, line: int):
    (tmp_path / "a.csv").write_text(f"text,label\n{rows}")
    with pytest.raises(InputError, match=rf"a\.csv:{line}: .*close"):
        places(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.xlsx.gz", b"", r"a\.xlsx\.gz: .*\.csv, \.tsv, \.jsonl"),
        ("a.csv", None, r"a\.csv: "),
        ("a.csv", b"text,text,label\n", r'a\.csv:1: .*"text"'),
        ("a.tsv", b"text\ttext\n", r'a\.tsv:1: .*"text"'),
        ("a.csv", b"text,caf\xe9\na,b\n", r"a\.csv:1: .*iconv"),
        ("a.csv", b'text,label\na,1\n"caf\xe9\nb",1\n', r"a\.csv:3: .*UTF-8.*0xe9"),
        ("a.csv", b"ending0,\rending1,label\na,b\n", r"a\.csv:1: "),
        ("a.csv", "text,label\na,1\n".encode("utf-16"), r"a\.csv: .*iconv -f UTF-16"),
        ("a.jsonl", '{"text": 1}\n'.encode("utf-16"), r"a\.jsonl: .*iconv -f UTF-16"),
        ("a.tsv", b"text\tlabel\n\0\t1\n", r"a\.tsv: .*0x00"),
        ("a.parquet", b"PAR1", r"a\.parquet: .*Parquet"),
        ("a.jsonl", b'[\n{"text": 1},\n{"text": 2}\n]\n', r"a\.jsonl:1: .*object on each line"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, name: str, content: bytes | None, problem: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=problem):
        list(read_table(str(tmp_path / name)))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_a_pipe_is_refused_because_it_can_be_read_only_once(tmp_path: Path, name: str):
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=rf"{name}: .*regular file"):
        list(read_table(str(tmp_path / name)))
