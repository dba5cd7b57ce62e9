"""The package as users install it: metadata, the citation and the changelog; in the long test, wheel and sdist."""

import json
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import child_processes, helpers

import bert_jax

REPOSITORY = helpers.REPOSITORY


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of `setup`."""
    arguments: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **given: arguments.update(given))
    runpy.run_path(str(REPOSITORY / "setup.py"))
    return arguments


def test_one_version_for_all(metadata: dict[str, Any], capsys: pytest.CaptureFixture):
    from bert_jax.cli import main

    assert metadata["version"] == bert_jax.__version__
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == bert_jax.__version__
    headings = re.findall(r"^## \[(.+?)\]", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", bert_jax.__version__]
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == bert_jax.__version__


def test_the_package_is_typed_and_has_its_configs(metadata: dict[str, Any]):
    assert (REPOSITORY / "bert_jax" / "py.typed").exists()
    assert metadata["package_data"] == {"bert_jax": ["py.typed"]}
    folders = {".".join(path.parent.relative_to(REPOSITORY).parts) for path in (REPOSITORY / "configs").rglob("*.py")}
    assert {f"bert_jax.{folder}" for folder in folders} <= set(metadata["packages"])
    assert metadata["python_requires"] == ">=3.11"
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.13"} <= set(metadata["classifiers"])


def test_the_install_page_lists_every_extra(metadata: dict[str, Any]):
    page = (REPOSITORY / "docs" / "install.md").read_text()
    table = {match[1]: match[2] for match in re.finditer(r"^\| `([\w-]+)` \| (.+?) \|", page, re.MULTILINE)}
    assert table.keys() == metadata["extras_require"].keys()
    for extra, packages in metadata["extras_require"].items():
        if extra != "dev":
            assert table[extra] == ", ".join(f"`{package}`" for package in packages), extra


# --- Wheel and source distribution ------------------------------------------------------------------------------------


def run(*words: object, cwd: Path, **environment: str) -> str:
    """Runs a command that has to succeed, and returns its output."""
    done = child_processes.run([*words], cwd=cwd, env=helpers.child_environment(**environment), timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked(*paths: str) -> list[str]:
    """The files of the repository, without those that git ignores."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *paths, cwd=REPOSITORY)
    return [name for name in names.split("\0") if name and (REPOSITORY / name).exists()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist, and the wheel that is built from it."""
    pytest.importorskip("build", reason="needs the dev extra: build")
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((REPOSITORY / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", output, cwd=source)
    return output


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a new environment with the wheel, which takes other packages from the present environment."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in others))
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps", "--no-index"]
    run(*pip, wheel, cwd=folder)
    return folder / "bin"


@pytest.mark.long
def test_an_installed_wheel_trains_from_an_empty_folder(installed: Path, tmp_path: Path):
    def command(*words: object) -> str:
        return run(installed / "bert-jax", *words, cwd=tmp_path, PYTHONPATH="")

    (tmp_path / "text.txt").write_text(helpers.make_corpus(documents=60))
    assert command("--version").strip() == bert_jax.__version__
    command("vocab", "--input", "text.txt", "--output", "tokenizer.json", "--size", "200")
    command("prepare", "--input", "text.txt", "--vocab", "tokenizer.json", "--output", "data", "--seq_len", "32",
            "--eval_fraction", "0.2")  # fmt: skip
    small: dict[str, object] = {
        "model.num_hidden_layers": 1, "model.hidden_size": 32, "model.num_attention_heads": 2,
        "model.intermediate_size": 64, "total_steps": 2, "global_batch_size": 8, "optimizer.warmup_steps": 1,
        "eval_batches": 1,
    }  # fmt: skip
    config: Sequence[str] = helpers.flags({"data.path": "data", **small})
    command("pretrain", "--config=bert_tiny", "--workdir=run", *config)
    scores = json.loads(command("evaluate", "--checkpoint", "run", "--data", "data"))
    assert scores["mlm_loss"] > 0
    program = (
        "import bert_jax, json; vectors = bert_jax.load('run').embed(['the ship .', 'the owl .']); "
        "print(json.dumps([bert_jax.__file__, vectors.shape]))"
    )
    place, shape = json.loads(run(installed / "python", "-c", program, cwd=tmp_path, PYTHONPATH=""))
    assert Path(place).is_relative_to(installed.parent)
    assert shape == [2, 32]
    (entry,) = json.loads((tmp_path / "run" / "provenance.json").read_text())["runs"]
    assert "commit" not in entry["software"]
    assert os.listdir(tmp_path / "data")
