"""The command that installs an extra."""

from importlib import metadata

import pytest

from bert_jax import errors


def test_hint_installs_the_requirements_of_the_extra():
    assert errors.install_hint("gcs") == "pip install 'gcsfs>=2024.6'"
    assert errors.install_hint("dataflow") == "pip install 'apache-beam[gcp]>=2.70' 'gcsfs'"


def test_hint_without_an_installed_package_is_for_a_clone(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert errors.install_hint("gcs") == "pip install -e '.[gcs]'"
