"""The arrows between packages: who may import whom."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "bert_jax"

BASE = {"errors", "progress", "remote", "whole_files"}
ALLOWED = {  # a package or module of bert_jax: what of bert_jax it may import besides itself and BASE
    "background_errors": set(),
    "errors": set(),
    "progress": set(),
    "remote": set(),
    "whole_files": set(),
    "config": set(),
    "host_memory": set(),
    "data": set(),
    "model": set(),
    "objectives": set(),
    "training": {"config", "data", "model", "objectives"},
    "interop": {"config", "data", "model", "objectives", "training"},
    "finetuning": {"config", "data", "model", "objectives", "training"},
    "inference": {"data", "finetuning", "model", "training"},
    "features": {"config", "data", "model", "training"},
    "report": {"training"},
    "ahead_of_time": {"config", "data", "model", "training"},
    "study": {"config", "data", "finetuning", "model", "study_table", "training"},
    "study_table": set(),
    "arguments": {"__init__"},
    "cli": {
        "ahead_of_time",
        "arguments",
        "background_errors",
        "config",
        "data",
        "features",
        "finetuning",
        "host_memory",
        "interop",
        "inference",
        "report",
        "study",
        "study_table",
        "training",
        "__init__",
    },
    "supported_versions": set(),
    "__init__": {"inference", "supported_versions"},
}
MODEL_LIBRARIES = {"jax", "flax", "bert_jax"}


def imports(path: Path) -> set[str]:
    """Absolute names of all that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(name: str) -> str:
    inside = name.split(".")[1]
    return inside if inside in ALLOWED or (PACKAGE / inside).is_dir() else "__init__"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path):
    relative = path.relative_to(PACKAGE)
    part = relative.parts[0] if len(relative.parts) > 1 else relative.stem
    assert part in ALLOWED, f"{part} is new: say in ALLOWED what it may import"
    for name in imports(path):
        if name.startswith("bert_jax."):
            assert part_of(name) in ALLOWED[part] | BASE | {part}, f"{relative} imports {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "model").glob("*.py")), ids=lambda path: path.name)
def test_the_model_is_jax_and_flax_alone(path: Path):
    import sys

    third_party = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
    assert third_party <= MODEL_LIBRARIES


@pytest.mark.parametrize("path", sorted((PACKAGE / "data").glob("*.py")), ids=lambda path: path.name)
def test_the_data_path_does_not_know_jax(path: Path):
    assert not {name.split(".")[0] for name in imports(path)} & {"jax", "flax", "optax", "orbax", "tensorflow"}


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.py")), ids=lambda path: path.name)
def test_configs_import_each_other_alone(path: Path):
    for name in imports(path):
        assert not name.startswith("bert_jax") or name.startswith("bert_jax.configs."), f"{path.name} imports {name}"
