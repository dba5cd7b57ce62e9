"""Files of text: formats, compression, lines from any offset, and the errors for files that are not text."""

import bz2
import gzip
import itertools
import lzma
from pathlib import Path

import pytest
import zstandard
from support.reading import documents

from bert_jax.errors import InputError
from bert_jax.files import text_files
from bert_jax.files.text_files import lines_from, locate

TEXT = "the ship sees the storm .\n\na little wave .\n"
COMPRESS = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}  # fmt: skip


@pytest.mark.parametrize("suffix", list(COMPRESS))
def test_lines_from_any_offset(suffix: str, tmp_path: Path):
    path = tmp_path / f"lines.txt{suffix}"
    content = b"ab\n\nlong\nend"
    path.write_bytes(COMPRESS[suffix](content))
    begins = [(0, b"ab"), (3, b""), (4, b"long"), (9, b"end")]
    starts = [0] if suffix else range(11)  # compressed files are read from their start
    for start, end in itertools.product(starts, (None, 5, 9, 10, 20)):
        expected = [line for line in begins if line[0] >= start]
        if end is not None and not any(start <= offset < end for offset, _ in begins):
            expected = []
        assert list(lines_from(str(path), start, end)) == expected
    assert [locate(str(path), offset) for offset, _ in begins] == [f"{path}:{number}" for number in (1, 2, 3, 4)]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_all_parts_of_a_compressed_file_are_read_and_a_cut_one_is_refused(suffix: str, tmp_path: Path):
    path = tmp_path / f"a.txt{suffix}"
    content = COMPRESS[suffix](b"one\ntwo\n" * 1000) + COMPRESS[suffix](b"three\n")
    path.write_bytes(content)
    assert [line for _, line in lines_from(str(path), 0, None)] == [b"one", b"two"] * 1000 + [b"three"]
    path.write_bytes(content[:-4])
    with pytest.raises(InputError, match=rf"^{path}: .*([Tt]runcated|ended before)"):
        list(lines_from(str(path), 0, None))


@pytest.mark.parametrize("name", ["corpus.txt", "corpus", "wiki.jsonl", "corpus.txt.zst", "table.csv"])
@pytest.mark.parametrize("content", [b"SQLite format 3\0abc", TEXT.encode("utf-16")], ids=["binary", "utf16"])
def test_a_file_that_is_no_text_is_refused(content: bytes, name: str, tmp_path: Path):
    path = tmp_path / name
    path.write_bytes(COMPRESS[".zst" if name.endswith(".zst") else ""](content))
    with pytest.raises(InputError, match=rf"^{path}: .*UTF-8.*0x00"):
        documents(path, errors="replace")


def test_compressed_data_under_a_plain_name_is_refused(tmp_path: Path):
    for suffix in (".gz", ".bz2", ".zst"):
        (tmp_path / "a.txt").write_bytes(COMPRESS[suffix](TEXT.encode()))
        with pytest.raises(InputError, match=rf"a\.txt: .*UTF-8.*{suffix}"):
            documents(tmp_path / "a.txt")


@pytest.mark.parametrize("suffix", list(COMPRESS))
@pytest.mark.parametrize(
    "text", [TEXT, "id,text\n1,a\n", "<html>a</html>\n", "[a] of {b}\n", "\ufeffthe ship .\n", "漢字\n"]
)
def test_any_text_is_accepted(text: str, suffix: str, tmp_path: Path):
    path = tmp_path / f"corpus.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](text.encode()))
    assert "\n\n".join(documents(path)).split() == text.removeprefix("\ufeff").split()


def test_files_of_wikiextractor_are_known_by_their_beginning(tmp_path: Path):
    path = tmp_path / "wiki_00"
    path.write_text('{"id": "1", "text": "The ship."}\n')
    assert documents(path) == ["The ship."]
    path.write_text('<doc id="1" url="u" title="A">\nA\n\nThe ship.\n\n</doc>\n')
    with pytest.raises(InputError, match=r"wiki_00: .*--json"):
        documents(path)


def test_a_line_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 100)
    (tmp_path / "a.txt").write_bytes(b"short\n" + b"x" * 101 + b"\n")
    with pytest.raises(InputError, match=r"a\.txt:2: .*\b100 bytes"):
        documents(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"a\rb\r", [b"a", b"b"]),
        (b"a" * 9_000 + b"\rb\r", [b"a" * 9_000, b"b"]),
        (b"a" * 9_000 + b"\rb\r\nc\r\nd", [b"a" * 9_000 + b"\rb\r", b"c\r", b"d"]),
        (b"a\rb" + b"c" * 9_000 + b"\nd", [b"a\rb" + b"c" * 9_000, b"d"]),
    ],
)
def test_cr_ends_lines_of_files_without_lf(content: bytes, lines: list[bytes], tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(content)
    assert [line for _, line in text_files.lines_from(str(tmp_path / "a.txt"), 0, None)] == lines
