"""Corpora of the Hugging Face Hub, from a server on this machine."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import helpers
from support.hub import Hub
from support.preparing import files

from bert_jax.files import provenance

DOCUMENTS = helpers.make_corpus(documents=60).strip().split("\n\n")


def parquet(documents):
    buffer = io.BytesIO()
    pq.write_table(pa.table({"id": [str(i) for i in range(len(documents))], "text": documents}), buffer)
    return buffer.getvalue()


@pytest.fixture
def hub():
    shown = {
        "en/train-0.parquet": parquet(DOCUMENTS[:30]), "en/train-1.parquet": parquet(DOCUMENTS[30:]),
        "README.md": b"---\nlicense: mit\n---\nThe card.\n", ".gitattributes": b"*.parquet filter=lfs\n",
    }  # fmt: skip
    server = Hub({"owner/wiki": {"main": shown, "v1": {"en/train-0.parquet": shown["en/train-0.parquet"]}}})
    yield server
    server.stop()


def prepare(hub, vocabulary_file, output, *inputs, **environment):
    """Runs `prepare` in a process of its own: huggingface_hub reads its address when it is imported."""
    return helpers.run_cli(
        "prepare", "--input", *inputs, "--vocab", vocabulary_file, "--output", output, "--sentences", "lines",
        "--workers", 2, "--json", **{**hub.environment, **environment},
    )  # fmt: skip


def test_a_dataset_of_the_hub_gives_the_bytes_of_its_text(hub, vocabulary_file, tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(DOCUMENTS))
    helpers.prepare_dataset(tmp_path / "a.txt", vocabulary_file, tmp_path / "local", seq_len=128, eval_fraction=0.01)
    for number, name in enumerate(("hf://datasets/owner/wiki", "hf://datasets/owner/wiki/en/*.parquet")):
        output = tmp_path / str(number)
        result = prepare(hub, vocabulary_file, output, name)
        assert result.returncode == 0, result.stderr
        assert ("README.md" in result.stderr) == ("*" not in name)
        assert files(output) == files(tmp_path / "local")
        found = json.loads((output / provenance.FILE).read_text())["runs"][0]["inputs"]["corpus"]
        paths = [file["path"] for file in found["files"]]
        assert paths == [f"hf://datasets/owner/wiki/en/train-{part}.parquet" for part in (0, 1)]


def test_a_pinned_revision_is_read_and_recorded(hub, vocabulary_file, tmp_path):
    result = prepare(hub, vocabulary_file, tmp_path / "data", "hf://datasets/owner/wiki@v1/en")
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "data" / provenance.FILE).read_text())["runs"][0]["inputs"]["corpus"]
    assert [file["path"] for file in found["files"]] == ["hf://datasets/owner/wiki@v1/en/train-0.parquet"]
    counts = json.loads(result.stdout)
    assert counts["train"]["documents"] + counts["eval"]["documents"] == 30
    assert not any("/resolve/main/" in request for request in hub.requests)


@pytest.mark.parametrize(
    ("name", "environment", "word"),
    [
        ("hf://datasets/owner/none", {}, "authenticated"),
        ("hf://datasets/owner/wiki@v9/en", {}, "not found"),
        ("hf://datasets/owner/wiki/fr/*.parquet", {}, "no file"),
        ("hf://wiki", {}, "name"),
        ("hf://datasets/owner/wiki", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        ("hf://datasets/owner/wiki", {"HF_ENDPOINT": "http://nowhere.invalid"}, "ConnectError"),
    ],
)
def test_an_input_that_cannot_be_reached_is_refused_in_one_line(
    hub, vocabulary_file, tmp_path, name, environment, word
):
    result = prepare(hub, vocabulary_file, tmp_path / "data", name, **environment)
    assert result.returncode == (1 if environment else 2)
    [line] = helpers.error_lines(result.stderr)
    assert line.startswith("bert-jax prepare: ")
    assert name in line
    assert word in line
    assert not (tmp_path / "data").exists()
