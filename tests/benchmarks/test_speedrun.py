"""The speedrun: its corpus and its records are verified, and a record that does not hold is refused."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import speedrun
from support import helpers

from bert_jax.config import load_config
from bert_jax.sections import flatten

Verify = Callable[..., tuple[int, str]]
LOSSES = (3.58, 3.57, 3.59)
KEYS = (
    "model.num_hidden_layers", "model.hidden_size", "model.num_attention_heads", "model.intermediate_size",
    "model.max_position_embeddings", "optimizer.warmup_steps", "optimizer.name",
)  # fmt: skip


def trained(seed: int, **changed: Any) -> dict[str, Any]:
    row = {
        "seed": seed, "steps": 100, "tokens": 51_200, "mlm_loss": LOSSES[seed], "unigram_loss": 6.2,
        "parameters": f"{seed:032x}", "core_seconds": 10.0 + seed,
    }  # fmt: skip
    return row | changed


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A record of two recipes with three seeds each."""
    file = tmp_path_factory.mktemp("record") / "record.json"
    for name, steps, config in (("first", 200, {}), ("second", 100, {"optimizer.name": "muon"})):
        entry = {
            "track": "quickstart", "config": {"total_steps": steps, **config}, "software": speedrun.software(),
            "cpu": speedrun.record.environment()["cpu"],
        }  # fmt: skip
        for seed in range(3):
            speedrun.add(file, name, entry, trained(seed, steps=steps, tokens=512 * steps))
    return file.read_bytes()


@pytest.fixture
def path(content: bytes, tmp_path: Path) -> Path:
    """A file of that record, to spoil."""
    file = tmp_path / "record.json"
    file.write_bytes(content)
    return file


@pytest.fixture
def verify(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Verify:
    """Verifies the record where training gives `trained` again, with `changed` values; returns status and output."""

    def run(tampered: Callable[[dict], None] = lambda content: None, **changed: Any) -> tuple[int, str]:
        content = json.loads(path.read_text())
        tampered(content)
        path.write_text(json.dumps(content))

        def rerun(folder: Path, config: dict, seeds: list[int], track: Any) -> Iterator[dict]:
            steps = config["total_steps"]
            yield from (trained(seed, **{"steps": steps, "tokens": 512 * steps, **changed}) for seed in seeds)

        monkeypatch.setattr(speedrun, "train_seeds", rerun)
        status = speedrun.main(["verify", str(path)])
        return status, "".join(capsys.readouterr())

    return run


def seed_row(content: dict, recipe: str, seed: int) -> dict:
    return next(
        row for row in content["tables"]["seeds"]["rows"] if (row["recipe"], row["seed"]) == (recipe, seed)
    )  # fmt: skip


def test_a_record_that_holds_is_equal_to_the_bit(verify: Verify):
    status, output = verify()
    assert status == 0
    assert output.count("equal to the bit") == 6


@pytest.mark.parametrize(
    ("key", "value"),
    [("mlm_loss", 3.570000000000001), ("tokens", 50_000), ("steps", 99), ("parameters", "0" * 32)],
)
def test_a_tampered_seed_is_refused(key: str, value: Any, verify: Verify):
    status, output = verify(lambda content: seed_row(content, "second", 1).update({key: value}))
    assert status == 1
    assert f"second, seed 1: {key}: recorded {value}, got {trained(1)[key]}" in output


def test_a_tampered_table_is_refused(verify: Verify):
    status, output = verify(lambda content: content["tables"]["quickstart"]["rows"][1].update(core_seconds=1.0))
    assert status == 1
    assert "table quickstart" in output


def test_a_record_above_its_loss_or_of_few_seeds_is_refused(verify: Verify):
    status, output = verify(lambda content: content["tables"]["seeds"]["rows"].pop())
    assert status == 1
    assert "second: MLM loss 3.5750 of seeds [0, 1]; expected at most 3.6 of 0, 1 and 2 at least" in output
    status, output = verify(lambda content: seed_row(content, "first", 1).update(mlm_loss=3.7))
    assert "first: MLM loss 3.6233 of seeds [0, 1, 2]; expected at most 3.6 " in output


def test_a_record_of_which_nothing_is_trained_again_is_refused(
    verify: Verify, path: Path, capsys: pytest.CaptureFixture
):
    def other_seeds(content: dict) -> None:
        for row in content["tables"]["seeds"]["rows"]:
            row["seed"] += 3

    assert speedrun.main(["verify", str(path), "--only", "third"]) == 2
    assert "--only third: expected one of first, second" in capsys.readouterr().err
    assert verify()[0] == 0
    assert speedrun.main(["verify", str(path), "--seeds", "4"]) == 1
    assert "first: seeds 0, 1, 2; expected one of --seeds 4" in "".join(capsys.readouterr())
    status, output = verify(other_seeds)  # which may have been picked
    assert status == 1
    assert "first: MLM loss 3.5800 of seeds [3, 4, 5]; expected at most 3.6 of 0, 1 and 2 at least" in output


def test_a_file_that_is_no_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "record.json").write_text('{"values": {}}')
    assert speedrun.main(["verify", str(tmp_path / "record.json")]) == 2
    assert f"{tmp_path / 'record.json'}: expected a record" in capsys.readouterr().err


def test_other_software_must_give_a_loss_within_the_bound(verify: Verify):
    def newer(content: dict) -> None:
        content["values"]["entries"]["second"]["software"]["jaxlib"] = "0.0.1"

    most = speedrun.bound(LOSSES)
    assert most == pytest.approx(4.303 * 0.01 * (4 / 3) ** 0.5)
    status, output = verify(newer, mlm_loss=3.58 + 0.99 * most)
    assert "second, seed 0: within 0.0497 nats (other jaxlib)" in output
    assert "second, seed 0: mlm_loss" not in output
    assert (status, "first, seed 0: mlm_loss" in output) == (1, True)  # whose software is this one
    _, output = verify(newer, mlm_loss=3.58 + 1.01 * most)
    assert "second, seed 0: mlm_loss 3.6302, 0.0502 from the mean; at most 0.0497" in output


def test_more_core_seconds_on_the_same_cpu_are_refused(verify: Verify):
    assert verify(core_seconds=13.7)[0] == 0
    status, output = verify(core_seconds=13.8)
    assert (status, "first, seed 0: 14 core-seconds; expected at most 14" in output) == (1, True)


@pytest.mark.parametrize(
    ("part", "key"), [(lambda entry: entry, "cpu"), (lambda entry: entry["software"], "instructions")]
)
def test_another_cpu_may_be_slower(part: Callable[[dict], dict], key: str, verify: Verify):
    def tamper(content: dict) -> None:
        for entry in content["values"]["entries"].values():
            part(entry)[key] = "another"

    assert verify(tamper, core_seconds=99.0)[0] == 0


def test_the_ladder_has_the_gain_and_the_change_of_each_recipe(path: Path):
    first, second = json.loads(path.read_text())["tables"]["quickstart"]["rows"]
    assert (first["change"], second["change"]) == ("the first", "`optimizer.name=muon`")
    assert (second["tokens_share"], second["core_seconds_share"]) == (0.5, 1.0)
    assert second["mlm_loss"] == pytest.approx(3.58)
    assert second["deviation"] == pytest.approx(0.01)


def test_another_config_replaces_the_rows_of_a_recipe(path: Path):
    content = json.loads(path.read_text())
    entry = content["values"]["entries"]["second"] | {"config": {"total_steps": 50}}
    rows = speedrun.add(path, "second", entry, trained(0, steps=50))
    assert [row["steps"] for row in rows] == [50]
    assert len(json.loads(path.read_text())["tables"]["seeds"]["rows"]) == 4


# --- Corpus and training ----------------------------------------------------------------------------------------------


def test_a_changed_wheel_or_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture):
    version, _ = speedrun.WHEELS["numpy"]
    (tmp_path / f"numpy-{version}-cp312.whl").write_bytes(b"another")
    with pytest.raises(speedrun.SpeedrunError, match=rf"sha256 of numpy-{version}.*: expected 90f98.*, got "):
        speedrun.corpus(tmp_path)
    (tmp_path / "text").mkdir()
    for package in speedrun.WHEELS:
        (tmp_path / "text" / f"{package}.txt").write_text("another")
    with pytest.raises(speedrun.SpeedrunError, match=rf"text: expected {speedrun.CORPUS_SHA256}"):
        speedrun.dataset(tmp_path)
    with pytest.raises(speedrun.SpeedrunError, match=r"data\.path=/data: .*pairs32"):
        speedrun.dataset(tmp_path, "/data")


@pytest.mark.long
def test_training_twice_is_equal_to_the_bit(dataset_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speedrun, "dataset", lambda folder, name="": dataset_dir)
    config = dict(flatten(helpers.small_config(dataset_dir, total_steps=4)))
    changes = {key: config[key] for key in KEYS} | {"total_steps": 4, "global_batch_size": 8, "seed": 5}
    changes["phases"] = [{"steps": 2, "objective.nsp": False}, {"steps": 2, "data.path": "pairs64"}]
    rows = [speedrun.train(tmp_path, json.loads(json.dumps(changes)), seed, 1e6) for seed in (0, 0, 1)]
    assert [row.pop("core_seconds") > 0 for row in rows] == [True] * 3
    assert rows[0] == rows[1]
    assert rows[0]["tokens"] == 4 * 8 * 64
    assert rows[0]["parameters"] != rows[2]["parameters"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("run-")]
    with pytest.raises(speedrun.SpeedrunError, match=r"parameters: expected at most 1,000"):
        speedrun.train(tmp_path, changes, 0, 1e3)


def test_recipes_are_configs_of_their_track_and_those_of_the_record():
    recipes = helpers.REPOSITORY / "benchmarks" / "speedrun_recipes.py"
    entries = json.loads((recipes.parent / "results" / "speedrun.json").read_text())["values"]["entries"]
    for name, entry in entries.items():
        assert speedrun.load(f"{recipes}:{name}") == entry["config"], name
    changes = speedrun.load(f"{recipes}:quickstart")
    assert not {*changes} & {*speedrun.FIXED}
    assert changes["total_steps"] == load_config(f"{recipes}:quickstart").total_steps
