"""CSV and TSV files as a corpus."""

import bz2
import csv
import gzip
import io
import tempfile
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reading import counted_bytes, documents

from bert_jax.data.corpora.corpus import CorpusOptions, plan
from bert_jax.errors import InputError
from bert_jax.files import text_files

COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.ZstdCompressor().compress}
CELLS = st.text(st.sampled_from('ab,;\t"\n\r é\u2028'), max_size=12)


def stripped(text):
    return "\n".join(filter(None, map(str.strip, text.split("\n"))))


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="a.csv"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=8),
    separator=st.sampled_from(",;\t"),
    end=st.sampled_from(["\n", "\r\n"]),
    everywhere=st.booleans(),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_files_of_pythons_csv_are_read(rows, separator, end, everywhere, mark):
    """Python's writer leaves a lone CR in a field without quotes, which no reader of lines can tell from an end."""
    file = io.StringIO(newline="")
    quoting = csv.QUOTE_ALL if everywhere or any("\r" in cell for row in rows for cell in row) else csv.QUOTE_MINIMAL
    writer = csv.writer(file, delimiter=separator, lineterminator=end, quoting=quoting)
    writer.writerows([("id", "text", "title"), *rows])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        path.write_text(mark + file.getvalue(), encoding="utf-8", newline="")
        assert documents(path, slice_bytes=1) == [found for row in rows if (found := stripped(row[1]))]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("id,text\n", []),
        ("", []),
        ("text\none\n\n\ntwo\n", ["one", "two"]),
        ('id,text\n1,"a"', ["a"]),
        ('id,text\n1,""\n2,b\n', ["b"]),
        ("id, text \n1, a\n", ["a"]),
        ("text\ra\rb\r", ["a", "b"]),
    ],
)
def test_forms_of_files(write, content, expected):
    assert documents(write(content)) == expected


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ("1,hello there\n2,more\n", 2, ["hello there", "header"]),
        ("id,Text\n1,a\n", 2, ["id, Text", "--text_field"]),
        ("text,id,text\na,1,b\n", 1, ["two columns"]),
        ("id,text\n1,a\n2,b, c\n", 3, ["expected 2", "got 3"]),
        ('id,text\n1,"a\n\nb"\n2,"c\nd\n', 5, ["end of data", "2 line", "quotes"]),
        ('id,text\n1,"a" b\n', 2, ["1 line", '""']),
        ('id,"text\n1,a\n', 1, ["quotes"]),
    ],
)
def test_an_invalid_file_is_named_with_the_line(write, content, line, words):
    with pytest.raises(InputError) as caught:
        documents(write(content))
    assert f"a.csv:{line}: " in str(caught.value)
    assert all(word in str(caught.value) for word in words)


def test_a_quote_that_is_never_closed_is_found_before_the_end(write, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 1 << 16)
    path = write('id,text\n1,a\n2,"b\n' + "3,a line without quotes\n" * 400_000)  # 9 MB
    read_bytes = counted_bytes(monkeypatch)
    tracemalloc.start()
    with pytest.raises(InputError, match=r"a\.csv:3: .*limit.*quotes"):
        documents(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(read_bytes) <= 4 << 20
    assert peak < 8 << 20


TSV = 'id\ttext\n1\t"Quotes," she said\n2\tan "odd one\n\n3\tthe "last\n'


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_tsv_has_no_quotes_and_is_sliced(write, suffix):
    path = write(COMPRESS[suffix](TSV.encode()), f"a.tsv{suffix}")
    for slice_bytes in (1, 7, 1 << 20):
        assert documents(path, slice_bytes) == ['"Quotes," she said', 'an "odd one', 'the "last']
    assert len(plan([str(path)], CorpusOptions(), 10)) == (1 if suffix else 6)


def test_a_table_with_quotes_is_named_csv(write):
    assert documents(write('id\ttext\n1\t"a ""b"" c\n\td"\n')) == ['a "b" c\nd']
    with pytest.raises(InputError, match=r"a\.tsv:3: .*\.csv"):
        documents(write('id\ttext\n1\t"a\nb"\n', "a.tsv"))
