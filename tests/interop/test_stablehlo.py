"""Programs exported as StableHLO: reloaded in a process without this package, they give the live model's outputs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import helpers, sources

import bert_jax
from bert_jax import cli
from bert_jax.interop import stablehlo

NEEDS_FLATBUFFERS = "needs the stablehlo extra: flatbuffers"
TEXTS = ["A text.", "Another, longer text."]  # of the guide


def run_the_guide(folder: Path) -> dict[str, np.ndarray]:
    """Runs the code of the guide in a fresh process beside the folder `hlo`, and returns its result."""
    guide = (helpers.REPOSITORY / "docs" / "guides" / "import_export_formats.md").read_text()
    (code,) = re.findall(r"```python\n(import jax, numpy\n.*?)```", guide, re.DOTALL)
    code += "import sys\nassert 'bert_jax' not in sys.modules\nnumpy.savez('result.npz', **result)\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=helpers.child_environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(np.load(folder / "result.npz"))


def test_a_pre_trained_model_in_a_fresh_process(vocabulary: list[str], tmp_path: Path):
    pytest.importorskip("flatbuffers", reason=NEEDS_FLATBUFFERS)
    checkpoint = sources.write_checkpoint(tmp_path / "checkpoint", vocabulary)
    command = ["export", "--format=stablehlo", f"--checkpoint={checkpoint.path}", f"--output={tmp_path / 'hlo'}"]
    assert cli.main(command) == 0
    (made,) = json.loads((tmp_path / "hlo" / "provenance.json").read_text())["runs"]
    assert made["inputs"]["checkpoint"]["path"] == str(checkpoint.path)
    result = run_the_guide(tmp_path)
    live = bert_jax.load(str(checkpoint.path))
    batch = live.batch(TEXTS)
    mlm, nsp = jax.jit(lambda batch: live.model(batch))(batch)
    np.testing.assert_allclose(result["mlm"], mlm[..., : live.config.vocab_size], atol=1e-5)
    np.testing.assert_allclose(result["nsp"], nsp[:, 0], atol=1e-5)
    np.testing.assert_allclose(result["hidden"], live.model.encode(batch)[0], atol=1e-5)


@pytest.mark.parametrize("kind", ["pooler", "classify", "tag"])
def test_batch_and_length_are_free(kind: str, vocabulary: list[str], tmp_path: Path):
    pytest.importorskip("flatbuffers", reason=NEEDS_FLATBUFFERS)
    checkpoint = sources.write_checkpoint(tmp_path / "checkpoint", vocabulary, ("pooler",))
    if kind != "pooler":
        record = {"name": "text", "classes": ["a", "b", "c"], "texts": [], "id": "id"}
        checkpoint = sources.write_fine_tuned(tmp_path / "task", checkpoint, kind, record, size=3)
    stablehlo.export(checkpoint, str(tmp_path / "hlo"))
    program = jax.export.deserialize(bytearray((tmp_path / "hlo" / "model.stablehlo").read_bytes()))
    assert {"cpu", "cuda", "tpu"} <= set(program.platforms)
    parameters = load_file(tmp_path / "hlo" / "parameters.safetensors")
    live = bert_jax.load(str(checkpoint.path))
    for texts in (["the ship"], ["the old clock and the baker .", "a storm", "the moon hears a ghost ."]):
        batch = live.batch(texts)
        result = program.call(parameters, batch["input_ids"], batch["token_type_ids"], batch["sequence_ids"])
        name, expected = ("hidden", live.model.encode(batch)[0]) if kind == "pooler" else ("outputs", live.model(batch))
        assert [*result] == [name]
        np.testing.assert_allclose(result[name], expected, atol=1e-5)
