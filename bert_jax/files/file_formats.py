"""Detects the format of a file of text from its name and its first bytes.

HTML, PDF and similar formats hold text among other data. Read as text, their tags and binary pages would become words.
They are refused, with the command that converts them if there is one. Tables (CSV, TSV, Parquet, Arrow) are read as a
corpus, and refused where a file has one text a line.
"""

import re
import shlex

from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.files.line_reader import BYTE_ORDER_MARK, COMPRESSED, blocks, is_compressed, line_number

_HEAD_BYTES = 4096  # read from a file's start to detect its format

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_JSON_OBJECT = re.compile(rb'[ \t]*\{[ \t]*"[^"]*"[ \t]*:')
_JSON_ARRAY = re.compile(rb'\s*\[\s*\{\s*"[^"]*"\s*:')
_JSON_OVER_LINES = re.compile(rb"\s*\{[ \t\r]*\n")
_WIKI_DOC = b"<doc id="
_HTML = (b"<!doctype html", b"<html")
_XML = (b"<?xml", b"<mediawiki")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_UNPACK = {".gz": "zcat", ".bz2": "bzcat", ".zst": "zstdcat"}
_TABLES = {"CSV": "csv", "TSV": "tsv", "Parquet": "parquet", "Arrow": "arrow"}  # as `text_format` returns them
_COLUMNAR = (  # format, first bytes; the second of Arrow is that of its streams, a continuation marker and a length
    ("Parquet", re.compile(rb"PAR1")),
    ("Arrow", re.compile(rb"ARROW1\0|\xff{4}[\s\S]{3}\0")),
)

_COMPRESSED_MAGIC = (  # suffix, first bytes
    (".gz", re.compile(rb"\x1f\x8b\x08")),
    (".bz2", re.compile(rb"BZh[1-9]1AY&SY")),
    (".zst", re.compile(rb"\x28\xb5\x2f\xfd")),
)
_MAGIC = (  # format, first bytes
    *_COLUMNAR,
    ("Avro", re.compile(rb"Obj\x01")),
    ("ORC", re.compile(rb"ORC[\0-\x1f\x7f-\xff]")),
    ("ArrayRecord", re.compile(rb"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f")),
    ("HDF5", re.compile(rb"\x89HDF\r\n")),
    ("NumPy", re.compile(rb"\x93NUMPY")),
    ("SQLite", re.compile(rb"SQLite format 3\0")),
    ("PDF", re.compile(rb"%PDF-")),
    ("RTF", re.compile(rb"\{\\rtf")),
    ("zip", re.compile(rb"PK\x03\x04|PK\x05\x06")),
    ("7-Zip", re.compile(rb"7z\xbc\xaf\x27\x1c")),
    ("RAR", re.compile(rb"Rar!\x1a\x07")),
    ("xz", re.compile(rb"\xfd7zXZ\0")),
    ("LZ4", re.compile(rb"\x04\x22\x4d\x18")),
    ("tar", re.compile(rb"[\s\S]{257}ustar")),
    ("Microsoft Office", re.compile(rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")),
    ("ELF", re.compile(rb"\x7fELF")),
    ("PNG", re.compile(rb"\x89PNG\r\n")),
    ("JPEG", re.compile(rb"\xff\xd8\xff")),
    ("GIF", re.compile(rb"GIF8[79]a")),
    ("TIFF", re.compile(rb"II\*\0|MM\0\*")),
    ("WebP", re.compile(rb"RIFF[\s\S]{4}WEBP")),
    ("WAV", re.compile(rb"RIFF[\s\S]{4}WAVE")),
)
_ENCODINGS = (  # of the byte order marks, the longer first
    ("UTF-32", b"\xff\xfe\0\0"),
    ("UTF-32", b"\0\0\xfe\xff"),
    ("UTF-16", b"\xff\xfe"),
    ("UTF-16", b"\xfe\xff"),
)
_SUFFIXES = {
    ".csv": "CSV", ".tsv": "TSV", ".tab": "TSV", ".html": "HTML", ".htm": "HTML", ".xhtml": "HTML",
    ".parquet": "Parquet", ".arrow": "Arrow", ".feather": "Arrow", ".avro": "Avro", ".orc": "ORC",
    ".tfrecord": "TFRecord", ".tfrecords": "TFRecord", ".array_record": "ArrayRecord", ".arrayrecord": "ArrayRecord",
    ".h5": "HDF5", ".hdf5": "HDF5", ".npy": "NumPy", ".npz": "NumPy", ".pdf": "PDF", ".rtf": "RTF", ".epub": "EPUB",
    ".doc": "Microsoft Office", ".docx": "Microsoft Office", ".xls": "Microsoft Office", ".xlsx": "Microsoft Office",
    ".pptx": "Microsoft Office", ".odt": "OpenDocument", ".zip": "zip", ".tar": "tar", ".tgz": "tar", ".tbz2": "tar",
    ".7z": "7-Zip", ".rar": "RAR", ".xz": "xz", ".lz4": "LZ4", ".sqlite": "SQLite", ".sqlite3": "SQLite",
    ".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".gif": "GIF", ".webp": "WebP", ".wav": "WAV", ".mp3": "MP3",
    ".mp4": "MP4",
}  # fmt: skip


def check_name(path: str) -> None:
    """Refuses a corpus file whose suffix is that of a format other than text and tables.

    Raises:
      InputError: the file, its format and the command that converts it.
    """
    found = _format_of_name(path)
    if found in ("Parquet", "Arrow") and is_compressed(path):
        raise _compressed(path, found)
    if found and found not in _TABLES:
        raise _refusal(path, found)


def is_named_as_records(path: str) -> bool:
    """Returns True for the name of a file of records: Parquet, Arrow, CSV, TSV or JSON lines."""
    return _plain_name(path).endswith(_JSON_LINES) or _format_of_name(path) in _TABLES


def compression_of(head: bytes) -> str:
    """Returns the suffix of compressed data, such as ".gz", from its first bytes; "" for other data."""
    return next((suffix for suffix, pattern in _COMPRESSED_MAGIC if pattern.match(head)), "")


def text_format(path: str) -> str:
    """Returns the format of a corpus file.

    It is "parquet", "arrow", "csv", "tsv", "json" (lines), "wiki" (WikiExtractor's <doc> elements) or "text". Parquet,
    Arrow, JSON lines and WikiExtractor's files are recognized under any name, CSV and TSV by their suffix.

    Raises:
      InputError: the file has another format or encoding, its name and content differ, it is JSON but not JSON lines,
        or it cannot be opened.
    """
    check_name(path)
    head = _head(path)
    if head.startswith(_LFS_POINTER):
        raise InputError(f"{path}: got a pointer of Git LFS, expected the file itself; fetch it: git lfs pull")
    named = _format_of_name(path)
    for found, pattern in _COLUMNAR:
        if pattern.match(head):
            if is_compressed(path):
                raise _compressed(path, found)
            return _TABLES[found]
        if named == found:
            got = "an empty file" if not head else f"a file that begins with {head[:8]!r}"
            raise InputError(f"{path}: got {got}, expected {found}; fetch the file again or rename it")
    _check_content(path, head)
    if named:
        return _TABLES[named]
    return _format_of_text(path, head.removeprefix(BYTE_ORDER_MARK))


def _format_of_text(path: str, head: bytes) -> str:
    is_named_json = _plain_name(path).endswith(_JSON_LINES)
    if _JSON_ARRAY.match(head) or (is_named_json and head.lstrip().startswith(b"[")):
        raise InputError(f"{path}: got a JSON array, expected JSON lines; convert it: {_json_command(path)}")
    if is_named_json and _JSON_OVER_LINES.match(head):
        raise InputError(
            f"{path}: got a JSON object over several lines, expected JSON lines, an object a line such as "
            f'{{"text": "..."}}; convert it: jq -c . {_shell(path)} > {_converted(path, "lines.jsonl")}'
        )
    if is_named_json:
        return "json"
    if head.startswith(_WIKI_DOC):
        return "wiki"
    return "json" if _JSON_OBJECT.match(head) else "text"


def check_lines(path: str) -> None:
    """Refuses a file that is not plain text with one example a line.

    Raises:
      InputError: the file, its format and the command that converts it; or the file cannot be opened.
    """
    if _plain_name(path).endswith(_JSON_LINES):
        raise InputError(
            f"{path}: got JSON lines, expected one text a line; convert it: {_lines_command(path, 'JSON')}"
        )
    if found := _format_of_name(path):
        raise _refusal(path, found)
    _check_content(path, _head(path))


def not_utf8(path: str, line: int, byte: int, remedy: str = "") -> InputError:
    """Returns the error for invalid UTF-8, with the command that re-encodes the file."""
    command = _iconv(path, "ISO-8859-1")
    return InputError(
        f"{path}:{line}: invalid UTF-8 (byte 0x{byte:02x}); {remedy}re-encode it, from Latin-1 for example: {command}"
    )


def decode_line(line: bytes, path: str, offset: int, errors: str) -> str:
    """Decodes the line of a file that begins at `offset`; `errors` as in `bytes.decode`.

    Raises:
      InputError: invalid UTF-8, with the file and the number of the line.
    """
    try:
        return line.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        number = line_number(path, offset) + line.count(b"\n", 0, error.start)
        raise not_utf8(path, number, line[error.start], remedy="pass --errors replace or ") from error


def _head(path: str) -> bytes:
    head = b""
    for block in blocks(path, 0):
        head += block
        if len(head) >= _HEAD_BYTES:
            break
    return head[:_HEAD_BYTES]


def _plain_name(path: str) -> str:
    """Returns the name in lower case, without compression suffixes."""
    name = path.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name


def _format_of_name(path: str) -> str:
    name = _plain_name(path)
    return next((found for suffix, found in _SUFFIXES.items() if name.endswith(suffix)), "")


def _check_content(path: str, head: bytes) -> None:
    if suffix := compression_of(head):
        renamed = f"{path}{suffix}"
        raise InputError(f"{path}: got {suffix} data, expected text; rename it to {renamed} or decompress it")
    for found, pattern in _MAGIC:
        if pattern.match(head):
            raise _refusal(path, found)
    if encoding := _encoding(head):
        raise InputError(f"{path}: got {encoding}, expected UTF-8; re-encode it: {_iconv(path, encoding)}")
    if 0 in head:
        # A TFRecord begins with its first record's length, 8 bytes, little endian.
        found = "TFRecord" if len(head) > 16 and head[4:8] == bytes(4) and head[:4] != bytes(4) else "binary data"
        raise _refusal(path, found, f" (byte 0x00 at offset {head.index(0)})")
    markup = head.removeprefix(BYTE_ORDER_MARK).lstrip().lower()
    if markup.startswith(_HTML):
        raise _refusal(path, "HTML")
    if markup.startswith(_XML):
        raise _refusal(path, "XHTML" if b"<html" in markup else "XML")


def _encoding(head: bytes) -> str:
    """Returns UTF-16 or UTF-32, detected by byte order mark or by the positions of zero bytes; else an empty string."""
    for encoding, mark in _ENCODINGS:
        if head.startswith(mark):
            return encoding
    pairs = len(head) // 2
    even, odd = head[0 : 2 * pairs : 2].count(0), head[1 : 2 * pairs : 2].count(0)
    if pairs >= 2 and max(even, odd) > 0.5 * pairs and min(even, odd) == 0:
        return "UTF-16LE" if odd else "UTF-16BE"
    return ""


def _compressed(path: str, found: str) -> InputError:
    suffix = path[path.rfind(".") :].lower()
    return InputError(
        f"{path}: got compressed {found}, which cannot be read in parts; decompress it: {_UNPACK.get(suffix, 'cat')} "
        f"{_shell(path)} > {_shell(path[: -len(suffix)])}"
    )


def _refusal(path: str, found: str, detail: str = "") -> InputError:
    only_text = "select text files only, for example with the pattern '*.txt'"
    remedy = {
        "HTML": f"extract its text: lynx -dump -nolist {_shell(path)} > {_converted(path, 'txt')}",
        "XML": "extract its text first (for a MediaWiki dump, with WikiExtractor)",
        "PDF": f"extract its text: pdftotext {_shell(path)} {_converted(path, 'txt')}",
        "TFRecord": "read a prepared TFDS dataset as --input tfds:NAME, or convert it to JSON lines",
        "xz": f"decompress it: xz -d {_shell(path)}",
        "LZ4": f"decompress it: lz4 -d {_shell(path)}",
        **dict.fromkeys(("zip", "tar", "7-Zip", "RAR"), "unpack it and name the files in it"),
        **dict.fromkeys(("Microsoft Office", "OpenDocument", "RTF", "EPUB"), "save it as plain text in UTF-8"),
    }
    remedy |= {"XHTML": remedy["HTML"], "ArrayRecord": remedy["TFRecord"]}
    if found in ("CSV", "TSV", "Parquet"):
        return InputError(f"{path}: {found}{detail}, expected text; convert it: {_lines_command(path, found)}")
    return InputError(f"{path}: {found}{detail}, expected text; {remedy.get(found, only_text)}")


def _lines_command(path: str, found: str) -> str:
    """Returns the command that converts a file to plain text with one text a line."""
    target, printed = _converted(path, "txt"), "' '.join(t.split())"
    if found == "Parquet":
        batches = "q.ParquetFile(sys.argv[1]).iter_batches(columns=['text'])"
        program = f"[print({printed}) for b in {batches} for t in b.column('text').to_pylist()]"
        return f'python -c "import sys,pyarrow.parquet as q; {program}" {_shell(path)} > {target}'
    texts = {
        "CSV": "r['text'] for r in csv.DictReader(sys.stdin)",
        "TSV": "r['text'] for r in csv.DictReader(sys.stdin, delimiter='\\t')",
        "JSON": "json.loads(line)['text'] for line in sys.stdin",
    }[found]
    return f'{_cat(path)} | python -c "import csv,json,sys; [print({printed}) for t in ({texts})]" > {target}'


def _json_command(path: str) -> str:
    program = "import json,sys; [print(json.dumps(row)) for row in json.load(sys.stdin)]"
    return f'{_cat(path)} | python -c "{program}" > {_converted(path, "lines.jsonl")}'


def _iconv(path: str, encoding: str) -> str:
    name = _shell(path)
    target = _converted(path, "utf8.txt")
    if path.lower().endswith(COMPRESSED):
        return f"{_cat(path)} | iconv -f {encoding} -t UTF-8 > {target}"
    return f"iconv -f {encoding} -t UTF-8 {name} > {target}"


def _cat(path: str) -> str:
    return f"{_UNPACK.get(path[path.rfind('.') :].lower(), 'cat')} {_shell(path)}"


def _shell(path: str) -> str:
    """Returns the path quoted for a shell; for a remote file, the name of its local copy."""
    return shlex.quote(path.rpartition("/")[2] if remote.is_remote(path) else path)


def _converted(path: str, suffix: str) -> str:
    """Returns the path that a conversion command writes to, in the folder of the file."""
    plain = path[: len(_plain_name(path))]
    folder, slash, name = plain.rpartition("/")
    stem = name.rpartition(".")[0] or name
    return _shell(f"{folder}{slash}{stem}.{suffix}")
