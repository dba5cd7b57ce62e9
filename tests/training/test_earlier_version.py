"""A dataset and a checkpoint of an earlier version, which every later version has to load.

`earlier_version.zip` has both as version e546507 wrote them from synthetic text, without its later checkpoint, and the
numbers that it went on to compute (`expected.json`).
"""

import json
import zipfile
from pathlib import Path

import pytest
from etils import epath
from support import helpers
from support.devices import one_device  # noqa: F401

from bert_jax.data.dataset import PreparedDataset
from bert_jax.errors import InputError
from bert_jax.tracking.metrics import read_metrics
from bert_jax.training.checkpointing.checkpoints import open_checkpoint
from bert_jax.training.evaluation import evaluate_checkpoint
from bert_jax.training.pretrain import pretrain


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    with zipfile.ZipFile(Path(__file__).with_name("earlier_version.zip")) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)  # the run has a relative path of its dataset
    return json.loads(Path("expected.json").read_text())


def test_dataset_and_checkpoint_of_an_earlier_version_give_its_evaluation(expected: dict):
    assert PreparedDataset("dataset").size("train") == 78
    assert evaluate_checkpoint(open_checkpoint("run"), "dataset") == pytest.approx(
        expected["evaluation_of_step_3"], rel=1e-5
    )


def test_key_that_an_earlier_version_lacks_counts_as_its_default(expected: dict):
    saved = Path("run/checkpoints/3/config/metadata")
    config = json.loads(saved.read_text())
    del config["objective"]["static_masks"]
    saved.write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"objective\.static_masks 0 -> 2"):
        pretrain(helpers.small_config(Path("dataset"), **expected["config"], objective__static_masks=2), "run")


def test_run_of_an_earlier_version_resumes_to_its_result(expected: dict):
    values = pretrain(helpers.small_config(Path("dataset"), **expected["config"]), "run")
    assert values == pytest.approx(expected["evaluation_of_step_6"], rel=1e-5)
    rows = [row for row in read_metrics(epath.Path("run")) if "split" not in row]
    assert {str(row["step"]): row["loss"] for row in rows} == pytest.approx(expected["losses"], rel=1e-5)
