"""The packaged configs: names, what their docstrings say, and the comments of their keys. Runs none of them.

`bert-jax --help` and completion list configs, so that this module imports only the standard library.
"""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

KINDS = {"pretrain": "", "finetune": "finetune/", "study": "studies/"}
"""Prefix of the names of a command's configs."""
_COMMON = "_common"


def aliases() -> dict[str, str]:
    """Returns the names of packaged configs that are another config with an argument: {"bert_base": "bert:base"}."""
    return importlib.import_module("bert_jax.configs").ALIASES


def config_files() -> dict[str, Path]:
    """Returns the file of each packaged config by its name, such as "finetune/glue"; sorted, without aliases."""
    spec = importlib.util.find_spec("bert_jax.configs")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = {
        file.relative_to(folder).with_suffix("").as_posix(): file
        for folder in folders for file in folder.glob("**/*.py") if not file.stem.startswith("_")
    }  # fmt: skip
    return dict(sorted(files.items()))


def kind_of(spec: str) -> str:
    """Returns the command, a key of `KINDS`, that takes the config `spec`, a name or a file."""
    path = spec.partition(":")[0]
    return next((command for command in ("finetune", "study") if KINDS[command] in f"/{path}"), "pretrain")


def keys_of(command: str) -> str:
    """Returns the name of the config that defines the keys of a command's configs."""
    return f"{KINDS[command]}default"


def summaries(command: str = "") -> dict[str, str]:
    """Returns the first sentence of each config's docstring by its name, those of one command or all."""
    files = config_files()
    found = {name: _first_sentence(file) for name, file in files.items()}
    found |= {name: f"The same as {spec}." for name, spec in aliases().items()}
    return {name: text for name, text in sorted(found.items()) if not command or kind_of(name) == command}


def docstring(spec: str) -> str:
    """Returns the docstring of the config `spec`, a name or a file; "" without one or without the file."""
    path = aliases().get(spec, spec).partition(":")[0]
    file = Path(path) if path.endswith(".py") else config_files().get(path)
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "" if file and file.is_file() else ""


def key_comments(command: str) -> dict[str, str]:
    """Returns the comment of each config key that has one, from the files that define the keys of a command."""
    name = keys_of(command)
    comments: dict[str, str] = {}
    if command == "study":
        comments |= {f"pretraining.{key}": text for key, text in key_comments("pretrain").items()}
    file = config_files()[name]
    shared = [] if command == "study" else [next(iter(config_files().values())).parent / f"{_COMMON}.py"]
    for source in [*shared, file]:
        comments |= _comments(source.read_text(encoding="utf-8"))
    return comments


def _first_sentence(file: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z`])", text)[0]


def _comments(source: str) -> dict[str, str]:
    """Returns the comment of each `config.KEY = VALUE`: that on its line, or the lines before it."""
    comments: dict[str, str] = {}
    before: list[str] = []
    for line in source.split("\n"):
        if alone := re.fullmatch(r"\s+# (.*)", line):
            before.append(alone[1])
            continue
        if assignment := re.match(r"\s+config\.([\w.]+) = ", line):
            own = re.search(r"  # (.*)$", line)
            if text := own[1] if own else " ".join(before):
                comments[assignment[1]] = text
        before = []
    return comments
