"""Code that would run what it reads: none in the package but the exceptions below, each with its reason."""

import ast

import pytest
from support import helpers

PACKAGE = helpers.REPOSITORY / "bert_jax"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(helpers.REPOSITORY / "configs").rglob("*.py")])

ALLOWED = {
    ("config.py", "exec_module"): "a config file is code, which its user chooses",
    ("data/preparation/beam.py", "import pickle"): "results of Beam's workers, in a folder of a random name",
    ("data/preparation/beam.py", "pickle.dumps"): "the same",
    ("data/preparation/beam.py", "pickle.loads"): "the same",
    ("interop/weights.py", "import pickle"): "its UnpicklingError alone",
}
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
CALLS = {
    "eval", "exec", "compile", "__import__", "exec_module", "extractall", "unpack_archive", "unsafe_load", "system"
}  # fmt: skip
MODEL_METHODS = {"eval", "compile"}  # as attributes: of jax, torch and re


def name_of(function: ast.expr) -> str:
    """Returns the dotted name of a called function."""
    if isinstance(function, ast.Attribute):
        return f"{name_of(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def dangers(source: str) -> list[str]:
    """Returns what in a source could run or unpickle data."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"import {name}" for name in names if name.partition(".")[0] in MODULES]
        if not isinstance(node, ast.Call):
            continue
        name, options = name_of(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
        last = name.rpartition(".")[2]
        is_true = {key for key, value in options.items() if isinstance(value, ast.Constant) and value.value is True}
        if name.partition(".")[0] in MODULES and "." in name:
            found.append(name)
        elif last in CALLS and not (last in MODEL_METHODS and "." in name):
            found.append(last)
        elif "allow_pickle" in options and not isinstance(options["allow_pickle"], ast.Constant):
            found.append("allow_pickle")
        elif is_true & {"allow_pickle", "shell", "trust_remote_code"}:
            found += sorted(is_true & {"allow_pickle", "shell", "trust_remote_code"})
        elif name == "torch.load" and "weights_only" not in is_true:
            found.append("torch.load")
        elif name == "yaml.load":
            found.append("yaml.load")
    return found


def test_nothing_that_is_read_is_run_but_the_exceptions():
    found = {
        (path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else helpers.REPOSITORY).as_posix(), danger)
        for path in SOURCES
        for danger in dangers(path.read_text(encoding="utf-8"))
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    ("source", "danger"),
    [
        ("eval(text)", "eval"), ("exec(text)", "exec"), ("import pickle", "import pickle"),
        ("from marshal import loads", "import marshal"), ("pickle.load(file)", "pickle.load"),
        ("np.load(file, allow_pickle=True)", "allow_pickle"), ("np.load(file, allow_pickle=flag)", "allow_pickle"),
        ("torch.load(path)", "torch.load"), ("torch.load(path, weights_only=False)", "torch.load"),
        ("yaml.load(text)", "yaml.load"), ("archive.extractall(folder)", "extractall"),
        ("subprocess.run(line, shell=True)", "shell"), ("os.system(line)", "system"),
        ("__import__(name)", "__import__"),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", "trust_remote_code"),
    ],
)  # fmt: skip
def test_dangers_are_found(source: str, danger: str):
    assert dangers(source) == [danger]


@pytest.mark.parametrize(
    "source",
    ["re.compile(pattern)", "model.eval()", "np.load(file)", "torch.load(path, weights_only=True)",
     "yaml.safe_load(text)", "ast.literal_eval(text)", "subprocess.run(words)"],
)  # fmt: skip
def test_safe_calls_are_not_found(source: str):
    assert dangers(source) == []
