"""The packaged configs: names, what their docstrings say, and the comments of their keys. Runs none of them.

`bert-jax --help` and completion list configs, so that this module imports no other package.
"""

import ast
import functools
import importlib
import importlib.util
import re
from pathlib import Path

from bert_jax import config_keys
from bert_jax.sections import Section, kinds

KINDS = {"pretrain": "", "finetune": "finetune/", "study": "studies/"}
"""Prefix of the names of a command's configs."""

CONFIG_TYPES: dict[str, type[Section]] = {
    "pretrain": config_keys.PretrainConfig, "finetune": config_keys.FinetuneConfig, "study": config_keys.StudyConfig
}  # fmt: skip
"""Type of a command's configs."""


def aliases() -> dict[str, str]:
    """Returns the names of packaged configs that are another config with an argument: {"bert_base": "bert:base"}."""
    result: dict[str, str] = importlib.import_module("bert_jax.configs").ALIASES
    return result


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


def key_comments(kind: type[Section]) -> dict[str, str]:
    """Returns the comment of each key of a config, by its dotted name; of a section too if it has one."""
    comments: dict[str, str] = {}
    own = _comments()
    for name, type_of in kinds(kind).items():
        if text := next((own[base.__name__, name] for base in kind.__mro__ if (base.__name__, name) in own), ""):
            comments[name] = text
        if isinstance(type_of, type) and issubclass(type_of, Section):
            comments |= {f"{name}.{key}": comment for key, comment in key_comments(type_of).items()}
    return comments


def _first_sentence(file: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z`])", text)[0]


@functools.cache
def _comments() -> dict[tuple[str, str], str]:
    """Returns the comment of each field by (class, field): that on its line, or the lines before it."""
    comments: dict[tuple[str, str], str] = {}
    before: list[str] = []
    owner = ""
    for line in Path(config_keys.__file__).read_text(encoding="utf-8").split("\n"):
        if alone := re.fullmatch(r"    # (.*)", line):
            before.append(alone[1])
            continue
        if of_class := re.match(r"class (\w+)", line):
            owner = of_class[1]
        elif field := re.match(r"    (\w+): .* = ", line):
            own = re.search(r"  # (.*)$", line)
            if text := own[1] if own else " ".join(before):
                comments[owner, field[1]] = text
        before = []
    return comments
