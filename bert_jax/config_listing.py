"""The packaged configs: names, what their docstrings say, and the comments of their keys. Runs none of them.

Completion lists configs, so that this module imports no other package.
"""

import ast
import importlib.util
import inspect
import re
from pathlib import Path

from bert_jax.config_keys import FinetuneConfig, PretrainConfig, StudyConfig
from bert_jax.sections import Section, kinds

CONFIG_TYPES: tuple[type[Section], ...] = (PretrainConfig, FinetuneConfig, StudyConfig)


def config_files() -> dict[str, Path]:
    """Returns the file of each packaged config by its name, such as "finetune/glue"; sorted."""
    spec = importlib.util.find_spec("bert_jax.configs")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = [(folder, file) for folder in folders for file in folder.glob("**/*.py") if not file.stem.startswith("_")]
    return dict(sorted((file.relative_to(folder).with_suffix("").as_posix(), file) for folder, file in files))


def docstring(spec: str) -> str:
    """Returns the docstring of the config `spec`, a name or a file; "" without one."""
    path = spec.partition(":")[0]
    file = Path(path) if path.endswith(".py") else config_files()[path]
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def key_comments(kind: type[Section]) -> dict[str, str]:
    """Returns the comment of each key of a config, by its dotted name; of a section too if it has one."""
    own: dict[str, str] = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(Section)]):
        before: list[str] = []  # the comments on the lines before a field
        for line in inspect.getsource(base).splitlines():
            if alone := re.fullmatch(r"    # (.*)", line):
                before.append(alone[1])
            elif field := re.match(r"    (\w+): .* = .*?(?:  # (.*))?$", line):
                own[field[1]] = field[2] or " ".join(before) or own.get(field[1], "")
                before = []
    comments: dict[str, str] = {}
    for name, type_ in kinds(kind).items():
        if own[name]:
            comments[name] = own[name]
        if isinstance(type_, type) and issubclass(type_, Section):
            comments |= {f"{name}.{key}": comment for key, comment in key_comments(type_).items()}
    return comments
