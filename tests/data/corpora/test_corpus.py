import bz2
import gzip
import json
import lzma
import tempfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reading import counted_bytes

from bert_jax.data.corpora import corpus
from bert_jax.data.corpora.corpus import CorpusOptions, Slice, expand, group_slices, plan, read
from bert_jax.errors import InputError

LINES = st.sampled_from(
    [
        "a",
        "bc def",
        "  indented ",
        "é",
        "漢字 かな",
        "😀",
        "x\u2028y",
        "x\x85y",
        "p\x0bq\x0cr",
        "",
        " ",
        "\t",
        "\u3000",
        "\xa0 ",
        "\r",
    ]
)
ENDS = st.sampled_from(["\n", "\r\n", "\n\n", "\n \n\n"])
TEXTS = st.tuples(st.lists(st.tuples(LINES, ENDS), max_size=40), LINES).map(
    lambda parts: "".join(line + end for line, end in parts[0]) + parts[1]
)


def whole(path) -> Slice:
    return Slice(str(path), 0, None, 0)


def read_slices(path, options: CorpusOptions, slice_bytes: int) -> list[str]:
    return [document for piece in plan([str(path)], options, slice_bytes) for document in read(piece, options)]


def expected_documents(text: str) -> list[str]:
    documents: list[list[str]] = [[]]
    for line in text.removeprefix("\ufeff").split("\n"):
        if line.strip():
            documents[-1].append(line.strip())
        else:
            documents.append([])
    return ["\n".join(lines) for lines in documents if lines]


@pytest.fixture
def write(tmp_path):
    def write_file(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write_file


@settings(max_examples=300, deadline=None)
@given(
    text=TEXTS,
    mark=st.sampled_from(["", "\ufeff"]),
    slice_bytes=st.integers(1, 60),
    limit=st.integers(1, 60) | st.just(1 << 20),
)
def test_slices_share_out_a_text_file(text, mark, slice_bytes, limit):
    options = CorpusOptions(max_document_bytes=limit)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.txt")
        path.write_bytes((mark + text).encode())
        documents = list(read(whole(path), options))
        assert read_slices(path, options, slice_bytes) == documents
    expected = expected_documents(mark + text)
    if limit == 1 << 20:
        assert documents == expected
    assert "\n".join(documents) == "\n".join(expected)
    longest_line = max(len(line.encode()) for line in text.split("\n")) + 1
    assert all(len(document.encode()) <= 2 * limit + longest_line for document in documents)
    for document in expected:  # One that is short is never broken. (Stripping only makes documents shorter.)
        if len(document.encode()) + 8 * document.count("\n") + 8 <= limit and expected.count(document) == 1:
            assert document in documents


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXTS, max_size=12), slice_bytes=st.integers(1, 80))
def test_slices_share_out_json_lines(texts, slice_bytes):
    content = "\n".join(json.dumps({"text": text}, ensure_ascii=index % 2 == 0) for index, text in enumerate(texts))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.jsonl")
        path.write_text(content, encoding="utf-8")
        documents = ["\n".join(line.strip() for line in text.split("\n") if line.strip()) for text in texts]
        assert read_slices(path, CorpusOptions(), slice_bytes) == list(filter(None, documents))


def test_a_file_without_blank_lines_is_shared_out_and_read_a_bounded_number_of_times(write, monkeypatch):
    line = b"some words on a line of the text that never ends\n"
    path = write("endless.txt", line * 40_000)
    size = len(line) * 40_000
    options = CorpusOptions(max_document_bytes=100_000)
    read_bytes = counted_bytes(monkeypatch)
    per_slice = [list(read(piece, options)) for piece in plan([path], options, 50_000)]
    assert "\n".join(document for documents in per_slice for document in documents) == (line * 40_000).decode()[:-1]
    assert sum(bool(documents) for documents in per_slice) >= size // 100_000
    assert sum(read_bytes) < 4 * size


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.ndjson"])
def test_compression_changes_nothing(write, name):
    documents = [f"Document {i}.\nIt has two lines." for i in range(500)]
    plain = "\n\n".join(documents) if name == "a.txt" else "\n".join(json.dumps({"text": d}) for d in documents)
    data = plain.encode()
    half = len(data) // 2
    zstd = zstandard.ZstdCompressor()
    files = [
        write(name, data),
        write(f"{name}.gz", gzip.compress(data[:half]) + gzip.compress(data[half:])),
        write(f"{name}.bz2", bz2.compress(data)),
        write(f"{name}.xz", lzma.compress(data[:half]) + lzma.compress(data[half:])),
        write(f"{name}.zst", zstd.compress(data[:half]) + zstd.compress(data[half:])),  # Two frames.
    ]
    options = CorpusOptions(max_document_bytes=1000)
    for path in files:
        assert read_slices(path, options, 1000) == documents
    assert [len(plan([path], options, 1000)) > 1 for path in files] == [True, False, False, False, False]


@pytest.mark.parametrize("slice_bytes", [1, 7, 1000])
def test_bad_utf8_is_named_by_file_and_line_whatever_the_slice(write, slice_bytes):
    path = write("latin.txt", b"one\n\ntwo\n\n" * 10 + b"three caf\xe9s\n\nfour\n")
    with pytest.raises(InputError, match=r"latin\.txt:41: .*byte 0xe9.*iconv.*--errors replace"):
        read_slices(path, CorpusOptions(), slice_bytes)
    assert "three caf\ufffds" in read_slices(path, CorpusOptions(errors="replace"), slice_bytes)


@pytest.mark.parametrize("errors", ["strict", "replace"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "JSON"),
        ('["a"]', "list"),
        ('{"body": "a"}', '"text"'),
        ('{"text": 3.5}', '"text" ... float'),
    ],
)
def test_a_bad_json_line_is_named(write, line, message, errors):
    path = write("wiki.jsonl", '{"text": "fine"}\n\n{"text": "fine"}\n' + line + "\n")
    with pytest.raises(InputError) as caught:
        read_slices(path, CorpusOptions(errors=errors), 20)
    problem = str(caught.value).removeprefix(f"{path}:4: ").partition(";")[0]
    assert problem != str(caught.value)
    assert all(part in problem for part in message.split(" ... "))


def test_what_is_replaced_is_counted(write, caplog):
    path = write("latin.txt", b"caf\xe9\n\ntea\n\n\xe9 \xe8\n")
    assert read_slices(path, CorpusOptions(errors="replace"), 1 << 20) == ["caf\ufffd", "tea", "\ufffd \ufffd"]
    (message,) = caplog.messages
    assert message.startswith(f"{path}: ")
    assert " 2 " in message


def test_half_a_surrogate_pair_never_comes_out_of_json(write):
    path = write("wiki.jsonl", r'{"text": "a\ud800b \ud83d\ude00"}')
    with pytest.raises(InputError, match=r":1: .*--errors replace"):
        list(read(whole(path), CorpusOptions()))
    assert list(read(whole(path), CorpusOptions(errors="replace"))) == ["a\ufffd\ufffd\ufffdb 😀"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('\ufeff \t{ "text" : "a"}\n{"text": "b"}', ["a", "b"]),
        ('{"id": "%s", "text": "a"}' % ("7" * 200), ["a"]),
        ("{braces}\nand text", ["{braces}\nand text"]),
        ('{"a", "b"} is a set', ['{"a", "b"} is a set']),
        ('{\n"text": "spread over lines"}', ['{\n"text": "spread over lines"}']),
        ('the first line is no JSON\n{"text": "a"}', ['the first line is no JSON\n{"text": "a"}']),
    ],
)
def test_json_lines_are_known_by_their_first_bytes(write, content, expected):
    for name in ("wiki_00", "wiki.txt"):
        assert read_slices(write(name, content), CorpusOptions(), 1 << 20) == expected
    with pytest.raises(InputError, match=r"wiki_01:2: .*\"text\""):
        read_slices(write("wiki_01", '{"text": "a"}\n{"body": "b"}'), CorpusOptions(), 1 << 20)


def test_expand_names_files_once_and_in_order(write, tmp_path, monkeypatch):
    for name in ("b/2.txt", "b/sub/1.txt", "b/.hidden", "a.txt", "[x].txt", "c.jsonl"):
        write(name, "text")
    monkeypatch.chdir(tmp_path)
    assert expand(["b"]) == ["b/2.txt", "b/sub/1.txt"]
    assert expand(["c.jsonl", "*.txt"]) == ["c.jsonl", "[x].txt", "a.txt"]
    assert expand(["[x].txt"]) == ["[x].txt"]
    assert expand(["**/*.txt", "a.txt"]) == ["[x].txt", "a.txt", "b/2.txt", "b/sub/1.txt"]


def test_small_files_share_a_task(monkeypatch):
    monkeypatch.setattr(corpus, "SLICE_BYTES", 10)
    slices = [Slice(f"{number}", 0, None, size) for number, size in enumerate([4, 6, 1, 30, 2, 3])]
    assert [[piece.path for piece in group] for group in group_slices(slices)] == [["0", "1"], ["2", "3"], ["4", "5"]]
    monkeypatch.undo()
    assert max(map(len, group_slices([Slice(f"{number}", 0, None, 0) for number in range(5000)]))) == 1024
    assert group_slices([]) == []


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "input: "),
        (["missing.txt"], r"input=missing\.txt: "),
        (["*.nothing"], r"input=\*\.nothing: "),
        (["empty"], "input=empty: "),
    ],
)
def test_inputs_that_name_nothing_are_refused(tmp_path, monkeypatch, inputs, message):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(InputError, match=message):
        plan(inputs, CorpusOptions())
