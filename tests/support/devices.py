"""How many of the eight simulated devices a run in this process takes."""

from collections.abc import Iterator

import jax
import pytest

from bert_jax.parallel.mesh import make_mesh


@pytest.fixture(autouse=True, scope="module")
def one_device() -> Iterator[None]:
    """Meshes are of one device: its programs compile, and its checkpoints are written, in a third of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_mesh, "__defaults__", (jax.devices()[:1],))
        yield


@pytest.fixture
def all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meshes are of all eight after all."""
    monkeypatch.setattr(make_mesh, "__defaults__", (None,))
