"""Number of simulated devices, of eight, that runs in this process use."""

from collections.abc import Iterator

import jax
import pytest

from bert_jax.parallel.mesh import make_mesh


@pytest.fixture(autouse=True, scope="module")
def one_device() -> Iterator[None]:
    """Limits meshes to one device, which compiles programs and writes checkpoints in a third of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_mesh, "__defaults__", (jax.devices()[:1],))
        yield


@pytest.fixture
def all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores meshes of all eight devices."""
    monkeypatch.setattr(make_mesh, "__defaults__", (None,))
