"""Preparation on a full disk and with little memory."""

import json
import os
import subprocess
import sys

import pytest
from support import helpers

from bert_jax.data.dataset import INFO_FILE

# --- The command line on a full disk ----------------------------------------------------------------------------


@pytest.mark.parametrize(("kilobytes", "workers"), [(40, 1), (200, 1), (200, 2)])
def test_prepare_on_a_full_disk(tmp_path, corpus_file, vocabulary_file, kilobytes, workers):
    """Fails in the first or the second pass: runs need 80 kB, the dataset more than 200 kB."""
    done = helpers.on_small_disk(
        tmp_path, kilobytes, "prepare", "--input", corpus_file, "--vocab", vocabulary_file, "--output",
        tmp_path / "disk" / "data", "--sentences", "lines", "--bucket_tokens", 4096, "--dupe_factor", 3, "--workers",
        workers,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "disk" in done.stderr.strip().split("\n")[-1]
    assert not done.stdout.strip()


# --- Memory -----------------------------------------------------------------------------------------------------

MEASURE = """
import resource, sys
from bert_jax.data.preparation.pipeline import PrepareOptions, prepare
from bert_jax.text.tokenizer import read_tokenizer
import bert_jax.data.preparation.sorted_runs as module
module.TOKENS_PER_RUN = 1 << 15
text, vocabulary, output = sys.argv[1:]
prepare([text], read_tokenizer(vocabulary), output,
        PrepareOptions(seq_len=64, sentences="lines", bucket_tokens=1 << 15))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_corpus(tmp_path, vocabulary_file):
    peaks: list[float] = []
    for number, documents in enumerate((500, 6_000)):
        text = tmp_path / f"{number}.txt"
        text.write_text(helpers.make_corpus(documents=documents))
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, text, vocabulary_file, tmp_path / f"data{number}"],
            capture_output=True, text=True, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    # 2.5 MB of text take 20 MB as lists of arrays, one for each sentence.
    assert peaks[1] - peaks[0] < 7.5, peaks
    assert json.loads((tmp_path / "data1" / INFO_FILE).read_text())["splits"]["train"]["documents"] > 5_500
