"""Resolves the inputs of a corpus to files: paths, folders, patterns, object stores, TFDS datasets and streams.

In a folder or the matches of a pattern, a file is text by its extension: .txt, one of JSON lines (but .json, which is
that of many descriptions) or of a table, or none; or the extension that the input ends with. Names such as LICENSE and
vocab.txt are no text. A file that is named itself is always read.
"""

import glob
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bert_jax.data.corpora import tfds_corpus
from bert_jax.data.options import TEXT_FIELD
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.files.text_files import COMPRESSED, is_special, named_format

log = logging.getLogger(__name__)

_NO_TEXT = re.compile(r"_|(readme|licen[cs]e|copying|notice|citation|changelog|vocab|merges|metrics)(?![a-z])", re.I)
_STDIN = "-"


def expand(inputs: Sequence[str], text_field: str = TEXT_FIELD) -> list[str]:
    """Resolves paths, folders and glob patterns to files.

    Each input's files are sorted, inputs keep their order, and duplicate files, links resolved, are read once. A
    folder stands for every file below it, with links to folders followed; names that begin with a dot are skipped, as
    in shell patterns. "tfds:NAME" becomes "tfds:NAME:train:TEXT_FIELD".

    Raises:
      InputError: no input, a missing file, a name that is not UTF-8, or a pattern or folder without files.
      OSError: a folder cannot be read.
    """
    if not inputs:
        raise InputError("input: expected at least one file, folder or pattern")
    files: dict[str, str] = {}
    for name in inputs:
        for path in _expand_one(name, text_field):
            files.setdefault(os.path.realpath(path) if is_local_file(path) else path, path)
    return list(files.values())


def is_local_file(path: str) -> bool:
    """Returns True for a path of `expand` that is a file on this machine."""
    return not (tfds_corpus.is_tfds(path) or remote.is_remote(path))


def _expand_one(name: str, text_field: str) -> list[str]:
    if tfds_corpus.is_tfds(name):
        return [tfds_corpus.PREFIX + ":".join(tfds_corpus.parse(name, text_field))]
    remote.parse_path(name)
    if remote.is_remote(name):
        files = _remote_files(name)
    else:  # First as a name, because it may contain pattern characters.
        tops = [name] if os.path.exists(name) else _matches(name)
        files = sorted({file for top in tops for file in _local_files(top)})
    for file in files:
        remote.parse_path(file)
    skipped = [path for path in files if files != [name] and not _is_text(path, name)]
    if skipped:
        words = "skipped %d file(s) whose names are no text's, such as %s; to read one, name it"
        log.warning(f"--input=%s: {words}", name, len(skipped), skipped[0])
        files = sorted({*files} - {*skipped})
    if not files:
        kind = "the pattern matches no file" if glob.has_magic(name) else "not found, or a folder without files"
        raise InputError(f"input={name}: {kind} of text; check it, and quote a pattern to protect it from the shell")
    return files


def _is_text(path: str, name: str) -> bool:
    stem, extension = os.path.splitext(os.path.basename(path).lower())
    if extension in COMPRESSED:
        name, extension = name.lower().removesuffix(extension), os.path.splitext(stem)[1]
    is_known = extension in ("", ".txt") or (named_format(path) != "" and not path.lower().endswith(".json"))
    return not _NO_TEXT.match(stem) and (is_known or name.lower().endswith(extension))


def _matches(pattern: str) -> list[str]:
    """Returns the matches of a pattern. Raises OSError for a folder that cannot be listed, which `glob` skips."""
    folders = os.path.dirname(pattern)
    while glob.has_magic(folders):
        for folder in glob.glob(f"{folders}/", recursive=True):
            os.scandir(folder).close()
        folders = os.path.dirname(folders)
    return glob.glob(pattern, recursive=True)


def _raise(error: OSError) -> None:
    raise error


def _local_files(top: str) -> Iterator[str]:
    """Yields a file, or all files but pipes below a folder, through links to other folders, each real folder once."""
    if not os.path.isdir(top):
        yield top
    read: set[str] = set()
    for folder, below, names in os.walk(top, onerror=_raise, followlinks=True) if os.path.isdir(top) else ():
        is_new = (real := os.path.realpath(folder)) not in read
        read.add(real)
        below[:] = sorted(name for name in below if is_new and not name.startswith("."))
        files = [os.path.join(folder, name) for name in names if is_new and not name.startswith(".")]
        yield from (file for file in files if not is_stream(file))


def _remote_files(name: str) -> list[str]:
    store, path = remote.store_of(name)
    with remote.store_errors(name):
        tops = [path] if store.exists(path) or not glob.has_magic(path) else store.glob(path)
        files = {file for top in tops for file in store.find(top) if "/." not in file.removeprefix(top)}
    return sorted(store.unstrip_protocol(file) for file in files)


def is_stream(name: str) -> bool:
    """Returns True for `-` (stdin), and for a pipe or device, such as `<(zcat FILE)` or /dev/stdin."""
    return name == _STDIN or name.startswith(("/dev/stdin", "/dev/fd/", "/proc/self/")) or is_special(name)


@contextmanager
def spool(inputs: Sequence[str], folder: Path) -> Iterator[dict[str, str]]:
    """Copies each stream among the inputs to a file in `folder`, as a corpus is read in parts.

    Yields the path of each input, by its name: that of the copy of a stream. Errors name the stream.
    """
    paths = {name: name for name in inputs}
    for number, name in enumerate(filter(is_stream, paths)):
        copy = folder / str(number) / ("stdin" if name == _STDIN else os.path.basename(name))
        copy.parent.mkdir()
        with sys.stdin.buffer if name == _STDIN else open(name, "rb") as source, open(copy, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        paths[name] = str(copy)
    try:
        yield paths
    except InputError as error:
        message = str(error)
        for name, path in paths.items():
            message = message.replace(path, name)
        raise InputError(message) from error
