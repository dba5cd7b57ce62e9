"""A Hugging Face folder to read, and a copy of it to spoil."""

import shutil
from pathlib import Path

import pytest
from support import sources
from support.devices import all_devices, one_device  # noqa: F401


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> Path:
    folder = sources.write_source(tmp_path_factory.mktemp("source") / "hf", vocabulary)
    sources.write_tokenizer(folder, vocabulary)
    return folder


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(source, tmp_path / "hf"))
