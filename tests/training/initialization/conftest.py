"""Checkpoints and datasets of continued pre-training."""

from pathlib import Path

import pytest
from support import continued
from support.devices import all_devices, one_device  # noqa: F401

from bert_jax.training.checkpoints import Checkpoint


@pytest.fixture(scope="session")
def init(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> Checkpoint:
    """A checkpoint as `import` writes it, with 64 positions."""
    return continued.write_init(tmp_path_factory.mktemp("init") / "imported", vocabulary)


@pytest.fixture(scope="session")
def domain(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> Path:
    """A dataset of a domain, with the vocabulary of `init`."""
    return continued.write_domain(tmp_path_factory.mktemp("domain") / "old", vocabulary)
