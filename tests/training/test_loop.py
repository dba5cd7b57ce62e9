"""The loop over steps, with a step of its own that counts and a run that writes nothing."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from bert_jax.config_keys import MeshKeys, PretrainConfig
from bert_jax.errors import BertJaxError, Interrupted
from bert_jax.parallel.mesh import make_mesh
from bert_jax.tracking.metrics import RunningMeans
from bert_jax.training import loop

LIMIT = 10


def trace_of(steps: str, folder: Path) -> loop.Trace:
    return loop.Trace(steps, SimpleNamespace(folder=folder, stack=ExitStack()))


class FakeRun:
    """A run of one device, whose state is the number of steps done. `saved` and `rows` are what the loop writes."""

    def __init__(self, trace: Any = None, unlogged: dict | None = None, start: int = 0, *, is_finite: bool = True):
        self.saved: list[int] = []
        self.unlogged: list[dict] = []
        self.sums = unlogged
        self.rows: list[dict] = []
        self.received: Any = None
        self.is_finite = is_finite
        self.flags: list[int] = []
        self.run = SimpleNamespace(
            mesh=make_mesh(MeshKeys(data=1, fsdp=1, tensor=1), jax.devices()[:1]),
            stop=SimpleNamespace(received=None),
            bar=SimpleNamespace(
                set_postfix_str=lambda text, refresh=True: None, unpause=lambda: None, update=lambda count: None
            ),
            checkpointer=SimpleNamespace(wait=lambda: None, check=lambda: None),
            stalls=SimpleNamespace(beat=lambda: None),
            trackers=SimpleNamespace(log=lambda step, row: self.rows.append({"step": step, **row})),
            start=start,
            total=100,
        )
        self.trace = trace or trace_of("", Path("unused"))
        self.evaluated: list[int] = []
        self.hooks: list[loop.Hook] = []

    def train_step(self, state, batch):
        done = int(state) + 1
        self.flags.append(int(jax.device_get(batch["stop"]).max()) if "stop" in batch else 0)
        if done == 10 and self.received:
            self.run.stop.received = self.received  # the signal comes while step 10 runs
        metrics = {
            "loss": np.float32(done), "learning_rate": np.float32(done / 10),
            "grad_norm": np.float32(1), "nonfinite_streak": np.int32(0 if self.is_finite else done),
        }  # fmt: skip
        return np.int32(done), metrics | ({"stop": batch["stop"].max()} if "stop" in batch else {})

    def go(
        self, stop: int = 100, eval_every: int = 0, log_every: int = 1_000, save_every: int = 1_000
    ):  # fmt: skip
        def save(step: int, state: Any) -> None:
            self.saved.append(step)
            self.unlogged.append(log_metrics.unlogged())

        start, run = self.run.start, self.run
        throughput = SimpleNamespace(pause=lambda: None, finished=lambda *_: None, rates=lambda: {})
        steps = loop.StepRange(
            start, stop, PretrainConfig(max_nonfinite_steps=LIMIT), self.train_step,
            lambda step, rows: {"input_ids": np.zeros((2, 4), np.int32)}, 2, throughput,
        )  # fmt: skip
        log_metrics = loop.LogMetrics(
            run, throughput, every=log_every, last=stop, extra=lambda step: {}, unlogged=self.sums
        )
        evaluate = loop.Evaluate(lambda step, state: self.evaluated.append(step) or {}, every=eval_every)
        hooks = [
            self.trace,
            evaluate,
            log_metrics,
            loop.Save(save, every=save_every, is_chosen=lambda step: False),
            *self.hooks,
        ]
        with jax.transfer_guard("allow"):
            return loop.run_steps(run, steps, np.int32(start), hooks)


def test_logged_steps_are_lines_of_keys_and_values(caplog):
    fake = FakeRun()
    with caplog.at_level("INFO", "bert_jax"):
        fake.go(stop=5, log_every=2)
    lines = [record.getMessage() for record in caplog.records if getattr(record, "on_bar", False)]
    assert [line.split()[:2] for line in lines] == [["step", "2/100"], ["step", "4/100"], ["step", "5/100"]]
    values = dict(word.split("=") for word in lines[-1].split()[2:])
    assert float(values["loss"]) == 5
    assert float(values["learning_rate"]) == 0.5


@pytest.mark.parametrize("when", ["between", "evaluated", "traced"])
def test_run_ended_by_nonfinite_steps_is_saved_at_the_reported_step(when: str, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "is_first", lambda: False)
    trace = trace_of(f"{LIMIT - 1}:{LIMIT}", tmp_path) if when == "traced" else None
    fake = FakeRun(trace, is_finite=False)
    with pytest.raises(BertJaxError) as raised:
        fake.go(eval_every=LIMIT if when == "evaluated" else 0)
    (saved,) = fake.saved
    assert f"step {saved}," in str(raised.value)
    assert saved in (LIMIT, LIMIT + 1)


def test_trace_that_is_not_recorded_is_due_after_the_same_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    due: list[list[int]] = []
    for is_first in (True, False):
        monkeypatch.setattr(loop, "is_first", lambda is_first=is_first: is_first)
        trace = trace_of("3:4", tmp_path)
        due.append([])
        for step in range(1, 7):
            if trace.is_due(step, set()):
                due[-1].append(step)
                trace.after(step, None)
    assert due[0] == due[1] == [2, 4]


class Recorder(loop.Hook):
    """Records its calls. It is due after multiples of 3."""

    def __init__(self, fake: FakeRun):
        self.calls: list[tuple[Any, ...]] = []
        self._fake = fake

    def start(self, step):
        self.calls.append(("start", step))

    def metrics(self, step, values):
        self.calls.append(("metrics", step, values["loss"]))

    def is_due(self, step, ends):
        return step % 3 == 0

    def after(self, step, state):
        self.calls.append(("after", step, int(state), len(self._fake.saved), len(self._fake.evaluated)))


def test_hook_sees_each_step_once_and_its_metrics_before_it_is_due():
    fake = FakeRun()
    fake.hooks = [recorder := Recorder(fake)]
    fake.go(stop=5, eval_every=3, save_every=3)
    assert recorder.calls == [
        ("start", 0), ("metrics", 1, 1.0), ("metrics", 2, 2.0), ("metrics", 3, 3.0), ("after", 3, 3, 1, 1),
        ("metrics", 4, 4.0), ("metrics", 5, 5.0),
    ]  # fmt: skip
    assert (fake.evaluated, fake.saved) == ([3, 5], [3, 5])


def test_stopped_run_is_saved_and_not_evaluated():
    fake = FakeRun()
    fake.received = SimpleNamespace(name="SIGTERM")
    with pytest.raises(Interrupted, match=r"SIGTERM.* 10\b"):
        fake.go(eval_every=50)
    assert (fake.evaluated, fake.saved) == ([], [10])


@pytest.mark.parametrize(("steps", "stop", "spans"), [("3:4", 6, ["3-4"]), ("1:2", 6, ["1-2"]), ("5:9", 6, ["5-"])])
def test_trace_covers_its_steps(steps: str, stop: int, spans: list[str], tmp_path, monkeypatch):
    fake = FakeRun(trace_of(steps, tmp_path))
    traced: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: traced.append(f"{len(fake.flags) + 1}-"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: traced.append(f"{traced.pop()}{len(fake.flags)}"))
    fake.go(stop=stop)
    assert traced == spans


def test_stop_signal_in_several_processes_is_saved_two_steps_later(monkeypatch):
    monkeypatch.setattr(loop.jax, "process_count", lambda: 2)
    fake = FakeRun()
    fake.received = SimpleNamespace(name="SIGTERM")
    with pytest.raises(Interrupted):
        fake.go()
    assert fake.flags[:11] == [0] * 10 + [1]  # the step after the signal tells the others
    assert fake.saved == [12]


def test_logged_metrics_are_means_over_the_steps_since_the_last_row():
    fake = FakeRun()
    fake.go(stop=10, log_every=4)
    assert [(row["step"], row["loss"], row["steps_averaged"]) for row in fake.rows] == [
        (4, 2.5, 4), (8, 6.5, 4), (10, 9.5, 2),
    ]  # fmt: skip
    assert [row["learning_rate"] for row in fake.rows] == pytest.approx([0.4, 0.8, 1.0])


def test_resumed_run_logs_the_means_of_a_run_never_stopped():
    whole, first = FakeRun(), FakeRun()
    whole.go(stop=8, log_every=4)
    first.go(stop=8, log_every=4, save_every=6)
    assert first.saved == [6, 8]
    second = FakeRun(unlogged=first.unlogged[0], start=6)
    second.go(stop=8, log_every=4)
    assert second.rows == whole.rows[-1:]


def test_skipped_steps_are_not_in_the_means():
    means = RunningMeans()
    for loss, streak in [(1.0, 0), (float("nan"), 1), (3.0, 0)]:
        means.add({"loss": loss, "nonfinite_streak": streak})
    row = means.take()
    assert (row["loss"], row["steps_averaged"]) == (2.0, 2)
    means.add({"loss": float("nan"), "nonfinite_streak": 1})
    row = means.take()
    assert np.isnan(row["loss"])
    assert row["steps_averaged"] == 0


def test_at_most_two_steps_are_in_flight():
    """A device's queue stays short: step n is dispatched before the metrics of n - 1 are read, and n + 1 after."""
    fake, read, unread = FakeRun(), [], []

    class Reader(loop.Hook):
        def metrics(self, step, values):
            read.append(step)

    def train_step(state, batch, run_step=fake.train_step):
        unread.append(int(state) + 1 - len(read))
        return run_step(state, batch)

    fake.train_step = train_step
    fake.hooks.append(Reader())
    fake.go(stop=6)
    assert read == [1, 2, 3, 4, 5, 6]
    assert max(unread) == 2
