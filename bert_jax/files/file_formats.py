"""Detects the format of a corpus file from its name and its first bytes.

CSV, HTML, Parquet and similar formats hold text among other data. Read as text, their headers, tags and binary pages
would become words. They are refused with the command that converts them.
"""

import re
import shlex
from collections.abc import Callable

from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.files.line_reader import BYTE_ORDER_MARK, COMPRESSED, blocks

_HEAD_BYTES = 4096  # read from a file's start to detect its format

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_JSON_OBJECT = re.compile(rb'[ \t]*\{[ \t]*"[^"]*"[ \t]*:')
_JSON_ARRAY = re.compile(rb'\s*\[\s*\{\s*"[^"]*"\s*:')
_JSON_OVER_LINES = re.compile(rb"\s*\{[ \t\r]*\n")
_WIKI_DOC = b"<doc id="
_HTML = (b"<!doctype html", b"<html")
_XML = (b"<?xml", b"<mediawiki")
_UNPACK = {".gz": "zcat", ".bz2": "bzcat", ".zst": "zstdcat"}

_COMPRESSED_MAGIC = (  # suffix, first bytes
    (".gz", re.compile(rb"\x1f\x8b\x08")),
    (".bz2", re.compile(rb"BZh[1-9]1AY&SY")),
    (".zst", re.compile(rb"\x28\xb5\x2f\xfd")),
)
_MAGIC = (  # format, first bytes
    ("Parquet", re.compile(rb"PAR1")),
    ("Arrow", re.compile(rb"ARROW1\0")),
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
    """Refuses a file whose suffix is that of a format other than text.

    Raises:
      InputError: the file, its format and the command that converts it.
    """
    if found := _format_of_name(path):
        raise _refusal(path, found, _documents_command)


def text_format(path: str) -> str:
    """Returns the format of a corpus file: "json" (lines), "wiki" (WikiExtractor's <doc> elements) or "text".

    Raises:
      InputError: the file is not text, is JSON but not JSON lines, or cannot be opened.
    """
    check_name(path)
    head = _head(path)
    _check_content(path, head, _documents_command)
    head = head.removeprefix(BYTE_ORDER_MARK)
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
        raise _refusal(path, found, _lines_command)
    _check_content(path, _head(path), _lines_command)


def not_utf8(path: str, line: int, byte: int, remedy: str = "") -> InputError:
    """Returns the error for invalid UTF-8, with the command that re-encodes the file."""
    command = _iconv(path, "ISO-8859-1")
    return InputError(
        f"{path}:{line}: invalid UTF-8 (byte 0x{byte:02x}); {remedy}re-encode it, from Latin-1 for example: {command}"
    )


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


def _check_content(path: str, head: bytes, command: Callable[[str, str], str]) -> None:
    for suffix, pattern in _COMPRESSED_MAGIC:
        if pattern.match(head):
            renamed = f"{path}{suffix}"
            raise InputError(f"{path}: got {suffix} data, expected text; rename it to {renamed} or decompress it")
    for found, pattern in _MAGIC:
        if pattern.match(head):
            raise _refusal(path, found, command)
    if encoding := _encoding(head):
        raise InputError(f"{path}: got {encoding}, expected UTF-8; re-encode it: {_iconv(path, encoding)}")
    if 0 in head:
        # A TFRecord begins with its first record's length, 8 bytes, little endian.
        found = "TFRecord" if len(head) > 16 and head[4:8] == bytes(4) and head[:4] != bytes(4) else "binary data"
        raise _refusal(path, found, command, f" (byte 0x00 at offset {head.index(0)})")
    markup = head.removeprefix(BYTE_ORDER_MARK).lstrip().lower()
    if markup.startswith(_HTML):
        raise _refusal(path, "HTML", command)
    if markup.startswith(_XML):
        raise _refusal(path, "XHTML" if b"<html" in markup else "XML", command)


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


def _refusal(path: str, found: str, command: Callable[[str, str], str], detail: str = "") -> InputError:
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
        return InputError(f"{path}: {found}{detail}, expected text; convert it: {command(path, found)}")
    return InputError(f"{path}: {found}{detail}, expected text; {remedy.get(found, only_text)}")


def _documents_command(path: str, found: str) -> str:
    """Returns the command that converts a table to JSON lines."""
    return _command(path, found, "json.dumps({'text': t})", "jsonl")


def _lines_command(path: str, found: str) -> str:
    """Returns the command that converts a file to plain text with one example a line."""
    return _command(path, found, "' '.join(t.split())", "txt")


def _command(path: str, found: str, printed: str, suffix: str) -> str:
    target = _converted(path, suffix)
    if found == "Parquet":
        batches = "q.ParquetFile(sys.argv[1]).iter_batches(columns=['text'])"
        program = f"[print({printed}) for b in {batches} for t in b.column('text').to_pylist()]"
        return f'python -c "import json,sys,pyarrow.parquet as q; {program}" {_shell(path)} > {target}'
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
