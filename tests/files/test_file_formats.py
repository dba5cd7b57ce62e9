"""Format detection of corpus files, and the errors for files that are not text."""

import bz2
import gzip
import json
import shlex
import sqlite3
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter

from bert_jax import cli
from bert_jax.data.corpora.corpus import CorpusOptions, plan, read
from bert_jax.errors import InputError
from bert_jax.files.file_formats import check_lines

TEXT = "the ship sees the storm .\n\na little wave .\n"
COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.ZstdCompressor().compress}


def documents(path, errors="strict", slice_bytes=1 << 20, cut="blank_line") -> list[str]:
    options = CorpusOptions(errors=errors, documents=cut)
    return [document for piece in plan([str(path)], options, slice_bytes) for document in read(piece, options)]


def array_record(folder):
    path = folder / "shard"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    writer.write(b"the ship sees the storm")
    writer.close()
    return path.read_bytes()


def tf_record():
    record = b"the ship sees the storm"
    return struct.pack("<QI", len(record), 7) + record + struct.pack("<I", 9)


def sqlite(folder):
    with sqlite3.connect(folder / "made.db") as database:
        database.execute("create table texts (text)")
    return (folder / "made.db").read_bytes()


def zipped(folder):
    with zipfile.ZipFile(folder / "made.zip", "w") as archive:
        archive.writestr("a.txt", TEXT)
    return (folder / "made.zip").read_bytes()


CONTENTS = {
    "Git LFS": lambda folder: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "ArrayRecord": array_record,
    "TFRecord": lambda folder: tf_record(),
    "SQLite": sqlite,
    "zip": zipped,
    ".gz": lambda folder: gzip.compress(TEXT.encode()),
    ".bz2": lambda folder: bz2.compress(TEXT.encode()),
    ".zst": lambda folder: COMPRESS[".zst"](TEXT.encode()),
    "PDF": lambda folder: b"%PDF-1.7\n1 0 obj\n",
    "ELF": lambda folder: Path(sys.executable).read_bytes()[:5000],
    "PNG": lambda folder: b"\x89PNG\r\n\x1a\n" + bytes(20),
    "JPEG": lambda folder: b"\xff\xd8\xff\xe0\x00\x10JFIF",
    "UTF-16": lambda folder: TEXT.encode("utf-16"),
    "UTF-32": lambda folder: TEXT.encode("utf-32"),
    "UTF-16LE": lambda folder: TEXT.encode("utf-16-le"),
    "UTF-16BE": lambda folder: TEXT.encode("utf-16-be"),
    "0x00": lambda folder: b"the ship\x00 sees .\n",
    "HTML": lambda folder: b"\xef\xbb\xbf\n <!DOCTYPE HTML>\n<html><body>the ship</body></html>\n",
    "XML": lambda folder: b'<?xml version="1.0"?>\n<mediawiki>the ship</mediawiki>\n',
}


@pytest.mark.parametrize("errors", ["strict", "replace"])
@pytest.mark.parametrize("found", list(CONTENTS))
def test_content_of_other_formats_is_refused_under_any_name(found, errors, tmp_path):
    content = CONTENTS[found](tmp_path)
    for name, suffix in (("corpus.txt", ""), ("corpus", ""), ("wiki.jsonl", ""), ("corpus.txt", ".zst")):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(COMPRESS[suffix](content))
        with pytest.raises(InputError) as caught:
            documents(path, errors)
        assert str(caught.value).startswith(f"{path}: ")
        assert found in str(caught.value)


@pytest.mark.parametrize("suffix", [".gz", ".bz2"])
def test_content_of_compressed_files_is_checked(suffix, tmp_path):
    path = tmp_path / f"page.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](b"<html>the ship</html>"))
    with pytest.raises(InputError, match=r"page\.txt\.\w+: HTML"):
        documents(path)


def test_every_slice_of_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "corpus.txt"
    options = CorpusOptions(errors="replace")
    path.write_bytes(b"the ship sees .\n" * 100)
    pieces = plan([str(path)], options, 400)
    path.write_bytes(b"SQLite format 3\0" + b"the ship sees .\n" * 100)
    for piece in pieces:
        with pytest.raises(InputError, match=r"corpus\.txt: SQLite"):
            list(read(piece, options))
    assert len(pieces) > 3
    with pytest.raises(InputError, match=r"corpus\.txt: SQLite"):
        plan([str(path)], options, 400)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a.html.bz2", "HTML"), ("a.tar.gz", "tar"), ("a.pdf", "PDF"), ("a.docx", "Microsoft Office"),
        ("a.tfrecord", "TFRecord"), ("a.orc", "ORC"), ("a.parquet.gz", "got compressed Parquet"),
        ("a.arrow.ZST", "got compressed Arrow"),
    ],
)  # fmt: skip
def test_extensions_of_other_formats_are_refused_before_reading(name, found, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=rf"{name}: {found}"):
        plan([str(tmp_path)], CorpusOptions())


@pytest.mark.parametrize("suffix", list(COMPRESS))
@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        "id,text,label\n1,the ship,0\n",
        'the page:\n\n<html><body>"one, two"</body></html>\n',
        "PAR10 is a postcode .\n",
        "BZh9 is no word .\n",
        "[a list] of {braces}\n",
        "%PDF is a format .\n",
        "\ufeffthe ship .\n",
        "漢字 かな\n",
    ],
)
def test_text_that_contains_markup_is_accepted(text, suffix, tmp_path):
    if text.startswith("PAR1"):
        text = f"the {text}"
    path = tmp_path / f"corpus.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](text.encode()))
    assert "\n\n".join(documents(path)).split() == text.removeprefix("\ufeff").split()


@pytest.mark.parametrize("name", ["wiki_00", "wiki.xml", "wiki.txt"])
def test_wikiextractor_passes(name, tmp_path):
    (tmp_path / name).write_text('<doc id="1" url="u" title="A">\nA\n\nThe ship.\n\n</doc>\n')
    assert documents(tmp_path / name) == ["The ship."]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_refused_with_the_command_that_converts_it(name, indent, tmp_path):
    path = tmp_path / name
    rows = json.dumps([{"text": "the ship ."}, {"text": "a wave ."}], indent=indent).encode()
    path.write_bytes(COMPRESS[".gz" if name.endswith(".gz") else ""](rows))
    with pytest.raises(InputError, match=rf"{name}: .*JSON array") as caught:
        documents(path)
    assert documents(run_command(caught.value)) == ["the ship .", "a wave ."]


def test_json_over_several_lines_is_refused(tmp_path):
    (tmp_path / "row.json").write_text(json.dumps({"text": "the ship ."}, indent=2))
    with pytest.raises(InputError, match=r"row\.json: .*jq -c"):
        documents(tmp_path / "row.json")


def run_command(error: InputError) -> str:
    """Runs the shell command at the end of a message, and returns the file that it writes."""
    command = str(error).split("convert it: ")[-1].split("re-encode it: ")[-1].split("for example: ")[-1]
    command = command.split("decompress it: ")[-1]
    command = command.replace("python -c", f"{shlex.quote(sys.executable)} -c")
    subprocess.run(command, shell=True, check=True, capture_output=True)
    return shlex.split(command)[-1]


@pytest.mark.parametrize(("name", "separator"), [("it's.csv", ","), ("a.tsv", "\t"), ("a b.csv.gz", ",")])
def test_the_command_that_converts_a_table_to_lines(name, separator, tmp_path):
    path = tmp_path / name
    rows = f'id{separator}text\n1{separator}"the ship, ""old"" ."\n2{separator}a wave .\n'.encode()
    path.write_bytes(COMPRESS[".gz" if name.endswith(".gz") else ""](rows))
    with pytest.raises(InputError) as caught:
        check_lines(str(path))
    assert Path(run_command(caught.value)).read_text() == 'the ship, "old" .\na wave .\n'


def test_the_command_that_converts_parquet_to_lines(tmp_path):
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"text": ["the ship .", "a wave ."], "id": [1, 2]}), path)
    with pytest.raises(InputError) as caught:
        check_lines(str(path))
    assert Path(run_command(caught.value)).read_text() == "the ship .\na wave .\n"


def test_the_command_that_decompresses_parquet(tmp_path):
    pq.write_table(pa.table({"text": ["the ship ."]}), tmp_path / "a b.parquet")
    for name in ("a b.parquet.gz", "corpus.txt.gz"):
        (tmp_path / name).write_bytes(gzip.compress((tmp_path / "a b.parquet").read_bytes()))
        with pytest.raises(InputError) as caught:
            documents(tmp_path / name)
        assert documents(run_command(caught.value)) == ["the ship ."]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_the_command_that_re_encodes_a_file(encoding, suffix, tmp_path):
    path = tmp_path / f"corpus.txt{suffix}"
    path.write_bytes(COMPRESS[suffix]("the ship .\nthe café .\n".encode(encoding)))
    with pytest.raises(InputError) as caught:
        documents(path)
    assert documents(run_command(caught.value)) == ["the ship .\nthe café ."]


def test_prepare_and_vocab_exit_with_2_and_write_nothing(tmp_path, vocabulary_file, capsys):
    (tmp_path / "corpus.txt").write_bytes(b"SQLite format 3\0" + np.arange(2000, dtype="<u2").tobytes())
    for command, output in (
        (["prepare", "--vocab", vocabulary_file, "--workers", 1], "data"),
        (["vocab", "--size", 100], "made.txt"),
    ):
        arguments = [*command, "--input", tmp_path / "corpus.txt", "--output", tmp_path / output, "--errors", "replace"]
        assert cli.main([str(argument) for argument in arguments]) == 2
        assert f"{tmp_path / 'corpus.txt'}: SQLite" in capsys.readouterr().err
    assert not (tmp_path / "data" / "dataset.json").exists()
    assert not (tmp_path / "made.txt").exists()


def test_a_file_in_a_store_is_looked_at_as_well(store):
    store.put("corpus/page.txt.gz", gzip.compress(b"<html>the ship</html>"))
    with pytest.raises(InputError, match=r"^gs://bucket/corpus/page\.txt\.gz: HTML"):
        documents("gs://bucket/corpus/*")
    store.put("corpus/rows.json", b'[{"text": "the ship ."}]\n')
    with pytest.raises(InputError, match=r"^gs://bucket/corpus/rows\.json: .* cat rows\.json "):
        documents("gs://bucket/corpus/rows.json")
