"""Resolves the inputs of a corpus to files: paths, folders, patterns, object stores and TFDS datasets.

In a folder or the matches of a pattern, files that describe a dataset are skipped: README.md, licenses, metadata and
loading scripts in the folder of Parquet, Arrow, CSV, TSV or JSON files or in a folder above them, and any README.md
if there are such files. A file that is named itself is always read, and so are all files of a folder of plain text.
"""

import errno
import glob
import json
import logging
import os
import re
import stat
from collections.abc import Iterator, Sequence

from bert_jax.data.corpora import tfds_corpus
from bert_jax.data.corpora.corpus_options import TEXT_FIELD
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.files.text_files import named_format
from bert_jax.text.tokenizer import FILE, SETTINGS, SPECIAL_TOKENS_MAP

log = logging.getLogger(__name__)

_DESCRIBES = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing)(?![a-z])[^.]*(\.(md|markdown|rst|txt|cff|bib))?"
    r"|dataset_infos?\.json|dataset_dict\.json|state\.json|croissant\.json|.*\.(py|ya?ml)"
    r"|_SUCCESS|_(common_)?metadata|_(committed|started)_.*",  # of Spark
    re.IGNORECASE,
)
_OF_DATASET = re.compile(r"(dataset|provenance)\.json|.*\.(npy|array_record)")
_OF_TOKENIZER = {FILE, SETTINGS}
_BESIDE_TOKENIZER = re.compile(
    r"vocab\.(txt|json)|merges\.txt|added_tokens\.json|(.*_)?config\.json|(metrics|trainer_state|checksums|provenance)\.jsonl?"
    rf"|{re.escape(SPECIAL_TOKENS_MAP)}|lock|.*\.(model|safetensors|bin|pt|pth|h5|msgpack|onnx|ckpt.*|index\.json)"
)
_NAMED = 5  # skipped files in the log


def expand(inputs: Sequence[str], text_field: str = TEXT_FIELD) -> list[str]:
    """Resolves paths, folders and glob patterns to files.

    Each input's files are sorted, inputs keep their order, and duplicate files, links resolved, are read once. A
    folder stands for every file below it, with links to folders followed; names that begin with a dot are skipped, as
    in shell patterns, and files that describe a dataset. "tfds:NAME" becomes "tfds:NAME:train:TEXT_FIELD".

    Raises:
      InputError: no input, a missing file, a name that is not UTF-8, a pattern or folder without files, or a folder
        or link that cannot be read.
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
        return [tfds_corpus.normalize(name, text_field)]
    remote.parse_path(name)
    if remote.is_remote(name):
        files = _remote_files(name)
    else:
        # First as a name, because it may contain pattern characters.
        try:
            tops = [name] if os.path.exists(name) else _matches(name)
            files = sorted({file for top in tops for file in _local_files(top) if _is_file(file)})
        except OSError as error:
            raise InputError(
                f"input={name}: {error.filename}: {error.strerror}; make it readable, or move it elsewhere"
            ) from error
    for file in files:
        remote.parse_path(file)
    if files:
        return _without_descriptions(name, files)
    if glob.has_magic(name):
        raise InputError(
            f"input={name}: the pattern matches no file; check it, and quote it to protect it from the shell"
        )
    raise InputError(f"input={name}: not found, or a folder without files; check the path")


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
    """Yields a file, or all files below a folder, through links to other folders, each real folder once."""
    if not os.path.isdir(top):
        yield top
        return
    read: set[str] = set()
    for folder, below, names in os.walk(top, onerror=_raise, followlinks=True):
        if (real := os.path.realpath(folder)) in read:
            below.clear()
            continue
        read.add(real)
        if hidden := [name for name in [*below, *names] if name.startswith(".") and folder == top]:
            log.info("--input=%s: skipped, because their names begin with a dot: %s", folder, _some(sorted(hidden)))
        below[:] = sorted(name for name in below if not name.startswith("."))
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _is_file(path: str) -> bool:
    """Returns True for a file or a link to one. Raises OSError for a link to nothing; a link to itself is none."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def _remote_files(name: str) -> list[str]:
    store, path = remote.store_of(name)
    with remote.store_errors(name):
        tops = [path] if store.exists(path) or not glob.has_magic(path) else store.glob(path)
        files = {file for top in tops for file in store.find(top) if "/." not in file.removeprefix(top)}
    return sorted(store.unstrip_protocol(file) for file in files)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if names[_NAMED:] else "")


def _without_descriptions(name: str, files: list[str]) -> list[str]:
    """Drops files that describe the dataset beside or below them, and logs their names."""
    if files == [name]:
        return files
    describing = {path for path in files if _DESCRIBES.fullmatch(os.path.basename(path))}
    data = (path for path in files if path not in describing and named_format(path))
    folders = {folder for path in data for folder in _folders_of(path)}
    readme = re.compile(r"readme\b", re.IGNORECASE)
    skipped = {
        path: None
        for path in files
        if path in describing
        and (os.path.dirname(path) in folders or (folders and readme.match(os.path.basename(path))))
    }
    if skipped:
        log.info(
            "--input=%s: skipped, because they describe the dataset and are not part of it: %s; to read one, name it",
            name,
            _some([*skipped]),
        )
    return [path for path in files if path not in skipped]


def _folders_of(path: str) -> Iterator[str]:
    while (folder := os.path.dirname(path)) != path:
        yield folder
        path = folder


def without_own_files(files: Sequence[str], vocabulary: str) -> list[str]:
    """Drops files that are no text: of prepared datasets and tokenizers, and the file `vocabulary`.

    If that is a folder, the other files of a tokenizer, a checkpoint or a run directly in it are dropped, and beside a
    `config.json` those that describe the model.

    Raises InputError if no other file is left.
    """
    own = os.path.realpath(vocabulary) if vocabulary else ""
    has_model = bool(vocabulary) and remote.exists(remote.parse_path(vocabulary) / "config.json")
    datasets: dict[str, bool] = {}
    skipped = []
    for path in files:
        folder, _, name = path.rpartition("/")
        if _OF_DATASET.fullmatch(name) and folder not in datasets:
            datasets[folder] = _is_dataset(f"{folder or '.'}/dataset.json")
        real = os.path.realpath(path)
        is_own = own and (
            real == own
            or (
                os.path.dirname(real) == own
                and (_BESIDE_TOKENIZER.fullmatch(name) or (has_model and _DESCRIBES.fullmatch(name)))
            )
        )
        if is_own or name in _OF_TOKENIZER or (_OF_DATASET.fullmatch(name) and datasets[folder]):
            skipped.append(path)
    if skipped:
        message = f"skipped, because they are of a tokenizer or a prepared dataset: {_some(skipped)}"
        if len(skipped) == len(files):
            raise InputError(f"input={files[0]}: no file with text is left; {message}")
        log.info("--input: %s", message)
    dropped = set(skipped)
    return [path for path in files if path not in dropped]


def _is_dataset(path: str) -> bool:
    """Returns True for the `dataset.json` of a prepared dataset."""
    file = remote.parse_path(path)
    try:
        content = json.loads(file.read_text()) if remote.exists(file) else {}
    except ValueError:
        return False
    return isinstance(content, dict) and content.keys() >= {"format_version", "splits", "hash"}
