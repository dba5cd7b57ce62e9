import json

from etils import epath
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bert_jax.training.metrics import METRICS_FILE, MetricsWriter, read_metrics


def test_rows_past_the_step_that_a_resume_starts_from_are_dropped(tmp_path):
    folder = epath.Path(tmp_path)
    writer = MetricsWriter(folder, resume_step=0)
    for step in range(1, 6):
        writer.write(step, {"loss": 1.0 / step})
    writer.write(4, {"loss": 0.5}, split="eval")
    writer.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 6, "lo')  # cut off by a kill
    writer = MetricsWriter(folder, resume_step=4)
    writer.write(5, {"loss": 7.0})
    writer.close()
    rows = read_metrics(folder)
    assert [(row["step"], row.get("split")) for row in rows] == [
        (1, None), (2, None), (3, None), (4, None), (4, "eval"), (5, None),
    ]  # fmt: skip
    assert rows[-1]["loss"] == 7.0


def test_what_is_not_finite_is_null_and_every_line_is_json(tmp_path):
    writer = MetricsWriter(epath.Path(tmp_path), resume_step=0)
    writer.write(1, {"loss": float("nan"), "grad_norm": float("inf"), "nonfinite_steps": 1})
    writer.close()
    text = (tmp_path / METRICS_FILE).read_text()
    assert json.loads(text, parse_constant=lambda name: 1 / 0) == {
        "step": 1, "loss": None, "grad_norm": None, "nonfinite_steps": 1,
    }  # fmt: skip


def test_tensorboard_gets_the_same_numbers(tmp_path):
    writer = MetricsWriter(epath.Path(tmp_path), resume_step=0)
    writer.write(3, {"loss": 2.5})
    writer.write(3, {"loss": 2.0}, split="eval")
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(3, 2.5)]
    assert [(event.step, event.value) for event in events.Scalars("eval/loss")] == [(3, 2.0)]
