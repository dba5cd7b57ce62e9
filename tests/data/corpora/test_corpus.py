import bz2
import gzip
import json
import logging
import lzma
import tempfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.preparing import files, run
from support.reading import counted_bytes, documents

from bert_jax import cli
from bert_jax.data.corpora import corpus
from bert_jax.data.corpora.corpus import CorpusOptions, Slice, expand, group_slices, plan, read, warn_of_text
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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.txt")
        path.write_bytes((mark + text).encode())
        found = documents(path, max_document_bytes=limit)
        assert documents(path, slice_bytes, max_document_bytes=limit) == found
    expected = expected_documents(mark + text)
    if limit == 1 << 20:
        assert found == expected
    assert "\n".join(found) == "\n".join(expected)
    longest_line = max(len(line.encode()) for line in text.split("\n")) + 1
    assert all(len(document.encode()) <= 2 * limit + longest_line for document in found)
    for document in expected:  # One that is short is never broken. (Stripping only makes documents shorter.)
        if len(document.encode()) + 8 * document.count("\n") + 8 <= limit and expected.count(document) == 1:
            assert document in found


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXTS, max_size=12), slice_bytes=st.integers(1, 80))
def test_slices_share_out_json_lines(texts, slice_bytes):
    content = "\n".join(json.dumps({"text": text}, ensure_ascii=index % 2 == 0) for index, text in enumerate(texts))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.jsonl")
        path.write_text(content, encoding="utf-8")
        expected = ["\n".join(line.strip() for line in text.split("\n") if line.strip()) for text in texts]
        assert documents(path, slice_bytes) == list(filter(None, expected))


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
    expected = [f"Document {i}.\nIt has two lines." for i in range(500)]
    plain = "\n\n".join(expected) if name == "a.txt" else "\n".join(json.dumps({"text": d}) for d in expected)
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
    for path in files:
        assert documents(path, 1000, max_document_bytes=1000) == expected
    counts = [len(plan([path], CorpusOptions(max_document_bytes=1000), 1000)) for path in files]
    assert [count > 1 for count in counts] == [True, *[False] * 4]


@pytest.mark.parametrize("slice_bytes", [1, 7, 1000])
def test_bad_utf8_is_named_by_file_and_line_whatever_the_slice(write, slice_bytes):
    path = write("latin.txt", b"one\n\ntwo\n\n" * 10 + b"three caf\xe9s\n\nfour\n")
    with pytest.raises(InputError, match=r"latin\.txt:41: .*byte 0xe9.*iconv.*--errors replace"):
        documents(path, slice_bytes)
    assert "three caf\ufffds" in documents(path, slice_bytes, errors="replace")


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
        documents(path, 20, errors=errors)
    problem = str(caught.value).removeprefix(f"{path}:4: ").partition(";")[0]
    assert problem != str(caught.value)
    assert all(part in problem for part in message.split(" ... "))


def test_what_is_replaced_is_counted(write, caplog):
    path = write("latin.txt", b"caf\xe9\n\ntea\n\n\xe9 \xe8\n")
    assert documents(path, errors="replace") == ["caf\ufffd", "tea", "\ufffd \ufffd"]
    (message,) = caplog.messages
    assert message.startswith(f"{path}: ")
    assert " 2 " in message


def test_half_a_surrogate_pair_never_comes_out_of_json(write):
    path = write("wiki.jsonl", r'{"text": "a\ud800b \ud83d\ude00"}')
    with pytest.raises(InputError, match=r":1: .*--errors replace"):
        documents(path)
    assert documents(path, errors="replace") == ["a\ufffd\ufffd\ufffdb 😀"]


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
        assert documents(write(name, content)) == expected
    with pytest.raises(InputError, match=r"wiki_01:2: .*\"text\""):
        documents(write("wiki_01", '{"text": "a"}\n{"body": "b"}'))


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


# --- `--text_field`: the field with the text ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"body": "words"}, "body"),
        ({"page": {"body": "words", "text": "no"}, "text": "no"}, "page.body"),
        ({"a": {"b": {"c": "words"}}}, "a.b.c"),
        ({"a.b": "words", "a": {"b": "no"}}, "a.b"),
    ],
)
def test_text_field_is_a_field_of_json(write, record, field):
    assert documents(write("a.jsonl", json.dumps(record)), text_field=field) == ["words"]


def test_a_null_has_no_document_also_in_place_of_an_object(write):
    records = [{"a": {"b": "words"}}, {"a": {"b": None}}, {"a": None}, {"a.b": None, "a": {"b": "no"}}]
    assert documents(write("a.jsonl", "\n".join(map(json.dumps, records))), text_field="a.b") == ["words"]


@pytest.mark.parametrize(
    ("record", "field", "found"),
    [
        ({"id": 1, "body": "words"}, "text", "id, body"),
        ({"page": {"body": "words"}}, "body", "page"),
        ({"page": "words"}, "page.body", "page"),
        ({}, "text", "none"),
    ],
)
def test_a_missing_field_is_named_with_those_found(write, record, field, found):
    with pytest.raises(InputError, match=rf'a\.jsonl:2: .*"{field}".*found {found};.*--text_field'):
        documents(write("a.jsonl", "\n" + json.dumps(record)), text_field=field)


def test_text_beside_records_is_read(write, tmp_path):
    write("a.txt", "one\n")
    write("b.jsonl", '{"body": "two"}\n')
    assert documents(tmp_path, text_field="body") == ["one", "two"]


def test_the_field_does_not_change_the_dataset(write, tokenizer, tmp_path):
    lines = {
        field: "".join(json.dumps({field: f"the {n} ship ."}) + "\n" for n in range(20)) for field in ("text", "b")
    }
    run(write("a.jsonl", lines["text"]), tokenizer, tmp_path / "text", allow_unk=1)
    run(write("b.jsonl", lines["b"]), tokenizer, tmp_path / "b", text_field="b", allow_unk=1)
    assert files(tmp_path / "text") == files(tmp_path / "b")


# --- Warnings about the characters of a corpus -------------------------------------------------------------------


ENGLISH = "The ship sees the storm, and 1 < 2 & 3 > 2. It is a little wave.\n" * 200
TURKISH = "Işıklı kıyıda İstanbul'un ılık sabahı. It is in English, too.\n"


@pytest.mark.parametrize(
    ("text", "lowercase", "words"),
    [
        (ENGLISH + "A review.<br />It is good.\n" * 9, True, ["<br />"]),
        (ENGLISH + "Q&amp;A, Tom&#39;s\n" * 9, False, ["&amp; and &#39;"]),
        (ENGLISH + TURKISH, True, []),
        (TURKISH * 9, True, ["--cased"]),
        (TURKISH * 9, False, []),
        ("", True, []),
        (b"caf\xe9\n", True, []),  # an error of the reader of the whole
    ],
)
def test_html_and_letters_i(text, lowercase, words, tmp_path, caplog):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    warn_of_text(plan([str(tmp_path)], CorpusOptions()), CorpusOptions(), lowercase=lowercase)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * len(words)
    assert all(word in message for word, message in zip(words, caplog.messages, strict=True))


@pytest.mark.parametrize("command", ["vocab", "prepare"])
def test_commands_warn(command, tmp_path, vocabulary_file, capsys):
    (tmp_path / "a.txt").write_text(("the ship<br />sees .\n" + TURKISH + "\n") * 40)
    arguments = {
        "vocab": ["--size", 200], "prepare": ["--vocab", vocabulary_file, "--allow_unk", 1, "--workers", 1],
    }[command]  # fmt: skip
    output = tmp_path / {"vocab": "made.json", "prepare": "made"}[command]
    words = [command, "--input", tmp_path / "a.txt", "--output", output, *arguments]
    assert cli.main([str(word) for word in words]) == 0
    error = capsys.readouterr().err
    assert "<br />" in error
    assert "--cased" in error
