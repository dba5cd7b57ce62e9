"""Training steps that are compiled in other threads, while a run is prepared."""

from contextlib import ExitStack
from pathlib import Path

import jax
import pytest
from support import helpers
from support.compilations import logged_compilations
from support.devices import one_device  # noqa: F401

from bert_jax.parallel.host_batches import abstract_batch
from bert_jax.parallel.mesh import make_mesh
from bert_jax.training.pretrain import plan_step, pretrain


def test_shapes_of_a_batch_are_those_that_are_compiled_and_an_error_is_raised_by_the_step(
    dataset_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    config = helpers.small_config(dataset_dir, gradient_accumulation=2)
    mesh = make_mesh(config.mesh)
    (loaded,) = helpers.open_phases(config)
    host = loaded.train_loader.batch(0, range(config.global_batch_size))
    described = abstract_batch(mesh, host, 2, batch_size=config.global_batch_size)
    assert described == loaded.abstract_batch(mesh)
    assert described["input_ids"].shape == (2, 8, 64)
    spec, step = plan_step(mesh, loaded, loaded.model)
    monkeypatch.setattr(step, "lower", lambda *_: (_ for _ in ()).throw(ValueError("of the compiler")))
    with ExitStack() as stack:
        step.compile_ahead(spec.abstract, [described], stack)
        with pytest.raises(ValueError, match="of the compiler"):
            step(spec.abstract, described)


def test_step_is_compiled_once_in_another_thread_and_those_of_other_shapes_when_they_come(
    dataset_dir: Path, tmp_path: Path
):
    phases = ({"steps": 2}, {"steps": 2, "global_batch_size": 8})
    with logged_compilations() as found:
        pretrain(
            helpers.small_config(dataset_dir, phases=phases, total_steps=4, eval_batches=0), str(tmp_path / "run")
        )  # fmt: skip
    threads = [thread.startswith("compile") for name, thread in found if name == "train_step"]
    assert threads == [True, False]
    assert jax.config.values["jax_log_compiles"] is False
