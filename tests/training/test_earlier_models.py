"""Models and results of an earlier version, which every later version has to load.

`earlier_models.zip` has what version e546507 wrote from synthetic text: an import, a search with one fine-tuned text
classifier and its predictions, and the table of a study.
"""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from bert_jax.finetuning.fine_tuned import predict
from bert_jax.finetuning.results import read_result
from bert_jax.inference.opening import open_model_of
from bert_jax.tracking.report.reported_runs import read_reported
from bert_jax.training.checkpointing.checkpoints import open_checkpoint

TRIAL = "tuned/lr-2e-05-seed-0"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with zipfile.ZipFile(Path(__file__).with_name("earlier_models.zip")) as archive:
        archive.extractall(folder)
    return folder


def test_import_of_an_earlier_version_loads(earlier: Path):
    found = open_checkpoint(str(earlier / "imported"))
    parameters = found.load_parameters()
    assert (found.bert_config.hidden_size, found.tokenizer.vocab_size) == (16, 103)
    assert found.missing_heads == ()
    words = np.asarray(parameters["embeddings"]["word"])
    assert words.shape == (128, 16)
    assert not words[103:].any()
    assert np.abs(words[:103]).sum() == pytest.approx(96.132278, rel=1e-6)


def test_fine_tuned_model_of_an_earlier_version_predicts_the_same(earlier: Path, tmp_path: Path):
    output = tmp_path / "predictions.jsonl"
    assert predict(open_model_of(str(earlier / TRIAL)), str(earlier / "new.csv"), str(output)) == 4
    before, now = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (earlier / output.name, output)
    )
    for old, new in zip(before, now, strict=True):
        assert new["prediction"] == old["prediction"]
        assert new["probabilities"] == pytest.approx(old["probabilities"], abs=2e-6)


def test_results_and_table_of_an_earlier_version_are_read(earlier: Path):
    assert read_result(epath.Path(earlier / TRIAL / "result.json"))["scores"]["dev"]["accuracy"] == 0.5
    reported = read_reported([str(earlier / "tuned"), str(earlier / "study" / "table.json")])
    (search,), (study,) = reported.searches, reported.studies
    assert search[1]["median"] == 0.5
    assert study.table["rows"][1]["columns"]["RTE"]["difference"] == pytest.approx(0.525 - 0.65)
    assert [run.name for run in reported.runs] == ["lr-2e-05-seed-0"]
