"""The arrows between packages: who may import whom; and code that would run what it reads."""

import ast
import functools
import importlib.util
import re
import sys
from pathlib import Path

from support import helpers

REPOSITORY = helpers.REPOSITORY
PACKAGE = REPOSITORY / "bert_jax"

BASE = {"batch", "config_keys", "errors", "progress", "sections", "version"}
ALLOWED = {  # a package or module of bert_jax: what of bert_jax it may import besides itself and BASE
    "batch": set(),
    "config_keys": set(),
    "errors": set(),
    "progress": set(),
    "sections": set(),
    "version": set(),
    "config": {"config_listing", "files"},
    "config_listing": set(),
    "configs": {"config"},
    "files": set(),
    "model": set(),
    "text": {"files"},
    "data": {"files", "text"},
    "parallel": {"config", "model"},
    "runtime": {"files"},
    "tracking": {"config", "data", "files", "model"},
    "training": {"config", "data", "files", "model", "parallel", "runtime", "text", "tracking"},
    "interop": {"files", "finetuning", "model", "text", "tracking", "training", "__init__"},
    "finetuning": {"config", "data", "files", "model", "parallel", "runtime", "text", "tracking", "training"},
    "inference": {"config", "files", "finetuning", "interop", "model", "parallel", "text", "training"},
    "ahead_of_time": {"config", "data", "files", "model", "parallel", "runtime", "tracking", "training"},
    "device_check": {"config", "data", "files", "runtime", "text", "tracking", "training"},
    "studies": {
        "config", "configs", "data", "files", "finetuning", "model", "parallel", "runtime", "text", "tracking",
        "training",
    },
    "command_line": {"config", "config_listing", "files", "tracking", "__init__"},
    "commands": {
        "ahead_of_time", "command_line", "config", "config_listing", "data", "device_check", "files", "finetuning",
        "inference", "interop", "runtime", "studies", "text", "tracking", "training",
    },
    "cli": {"command_line", "commands", "runtime"},
    "__init__": {
        "ahead_of_time", "command_line", "commands", "config", "data", "finetuning", "inference",
        "text", "training",
    },
}  # fmt: skip
MODEL_LIBRARIES = {"jax", "flax", "bert_jax"}


@functools.cache
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


def libraries(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def test_imports_go_one_way():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        part = relative.parts[0] if len(relative.parts) > 1 else relative.stem
        assert part in ALLOWED, f"{part} is new: say in ALLOWED what it may import"
        allowed = ALLOWED[part] | BASE | {part}
        inside = (name for name in imports(path) if name.startswith("bert_jax."))
        found += [f"{relative} imports {name}" for name in inside if part_of(name) not in allowed]
    assert not found, "\n".join(found)


def test_the_model_is_jax_and_flax_alone():
    found = {path.name: libraries(path) - {*sys.stdlib_module_names} for path in (PACKAGE / "model").glob("*.py")}
    assert found
    assert not {name: used for name, used in found.items() if not used <= MODEL_LIBRARIES}


def test_the_data_path_does_not_know_jax():
    unwanted = {"jax", "flax", "optax", "orbax", "tensorflow"}
    found = {str(path.relative_to(PACKAGE)): libraries(path) & unwanted for path in (PACKAGE / "data").rglob("*.py")}
    assert found
    assert not {name: used for name, used in found.items() if used}


def test_tensorflow_is_imported_for_its_checkpoints_alone():
    users = [path.name for path in PACKAGE.rglob("*.py") if "tensorflow" in libraries(path)]
    assert users == ["tensorflow_checkpoints.py"]


def test_configs_import_each_other_and_their_keys_alone():
    paths = [*(REPOSITORY / "configs").rglob("*.py")]
    assert paths
    inside = [(path.name, name) for path in paths for name in imports(path) if name.startswith("bert_jax")]
    expected = ("bert_jax.config.", "bert_jax.config_keys.", "bert_jax.configs.")
    assert not [pair for pair in inside if not pair[1].startswith(expected)]


def test_arrows_form_no_cycle():
    done: set[str] = set()
    while left := [part for part in ALLOWED if part not in done]:
        free = [part for part in left if ALLOWED[part] <= done | BASE | {"__init__"}]
        assert free, f"{left} import each other"
        done.update(free)


def test_names_that_benchmarks_and_launchers_import_exist():
    missing = []
    for path in [*(REPOSITORY / "benchmarks").rglob("*.py"), *(REPOSITORY / "launch").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bert_jax"):
                module = importlib.import_module(str(node.module))
                for name in (alias.name for alias in node.names):
                    if not hasattr(module, name) and not importlib.util.find_spec(f"{node.module}.{name}"):
                        missing.append(f"{path.name}: {node.module}.{name}")
    assert not missing


# --- Code that would run what it reads: what ruff's rules S do not know ----------------------------------------------


DANGERS = (
    r"allow_pickle=(?!False)|trust_remote_code|run_path|torch\.load\((?!.*weights_only=True)"
    r"|\bimport (?:pickle|marshal|shelve|dill|cloudpickle|joblib)\b"
)
EXCEPTIONS = {
    ("bert_jax/config.py", "run_path"),  # a config file is code, which its user chooses
    ("bert_jax/data/preparation/beam.py", "import pickle"),  # results of Beam's workers, in a folder of a random name
    ("bert_jax/interop/weights.py", "import pickle"),  # its UnpicklingError alone
}


def test_nothing_that_is_read_is_run_but_the_exceptions():
    paths = [path for folder in ("bert_jax", "configs") for path in (REPOSITORY / folder).rglob("*.py")]
    found = {
        (str(path.relative_to(REPOSITORY)), one) for path in paths for one in re.findall(DANGERS, path.read_text())
    }
    assert found == EXCEPTIONS
