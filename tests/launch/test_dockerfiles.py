"""Dockerfiles: hadolint, their common steps, and the files that they copy."""

import importlib.util
import re
from pathlib import Path

import pytest
from support import helpers

DOCKERFILES = sorted((helpers.REPOSITORY / "docker").glob("*.Dockerfile"))
EXTRAS = {"cpu": [], "tpu": ["jax[tpu]"], "cuda": ["jax[cuda13]"]}


def steps(dockerfile: Path) -> list[tuple[str, str]]:
    spec = importlib.util.spec_from_file_location("test_dockerfile", helpers.REPOSITORY / ".ci" / "test_dockerfile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.instructions(dockerfile.read_text()))


def test_there_is_an_image_for_each_platform():
    assert {path.stem for path in DOCKERFILES} == EXTRAS.keys()


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_has_pinned_packages_an_entry_point_and_no_root(dockerfile: Path):
    found = steps(dockerfile)
    last = dict(found)
    assert found[0] == ("FROM", "python:3.13-slim")
    assert last["ENTRYPOINT"] == '["bert-jax"]'
    assert last["USER"] == "1000"
    installs = [text for name, text in found if name == "RUN" and "pip install" in text]
    assert "--constraint constraints/py313.txt" in installs[0]
    assert re.findall(r"'(jax\[\w+\])'", installs[0]) == EXTRAS[dockerfile.stem]
    assert "--no-deps ." in installs[1]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_copied_files_are_sent_to_the_builder(dockerfile: Path):
    sent = {line[1:] for line in (helpers.REPOSITORY / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = [source for name, text in steps(dockerfile) if name == "COPY" for source in text.split()[:-1]]
    for source in copied:
        assert (helpers.REPOSITORY / source).exists()
        assert source.partition("/")[0] in sent
    assert {"setup.py", "bert_jax", "configs"} <= set(copied)
