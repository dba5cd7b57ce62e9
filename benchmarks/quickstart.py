"""Runs the quickstart as a user does, and records its scores, steps and duration.

    python benchmarks/quickstart.py [--folder runs/quickstart]

An existing folder is deleted first. The bits are those of two cores; with another number of them XLA divides sums
otherwise.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from record import REPOSITORY, Record, make_parser

MEASURES = (
    "bert_jax",
    "configs/bert_tiny.py",
    "configs/quickstart.py",
    "launch/quickstart.sh",
    "launch/python_docs.py",
)
COLUMNS = {
    "steps": "{steps:,}",
    "million tokens": "{million_tokens:.1f}",
    "minutes": "{minutes:.1f}",
    "MLM loss": "{mlm_loss:.2f}",
    "unigram baseline": "{unigram_loss:.2f}",
    "MLM accuracy": "{mlm_accuracy:.1%}",
    "NSP accuracy": "{nsp_accuracy:.1%}",
}


def main() -> None:
    parser = make_parser(__doc__, "quickstart")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "quickstart", help="output")
    options = parser.parse_args()
    record = Record(options.json, MEASURES)
    shutil.rmtree(options.folder, ignore_errors=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    began = time.monotonic()
    subprocess.run(
        [REPOSITORY / "launch" / "quickstart.sh", options.folder], env=os.environ | {"PATH": path}, check=True
    )
    scores = json.loads((options.folder / "evaluation.json").read_text(encoding="utf-8"))
    config = json.loads((options.folder / "run" / "config.json").read_text(encoding="utf-8"))
    steps, tokens = config["total_steps"], config["global_batch_size"] * config["data"]["seq_len"]
    row = {"steps": steps, "million_tokens": steps * tokens / 1e6, "minutes": (time.monotonic() - began) / 60}
    record.set_table("scores", COLUMNS, [row | {key: scores[key] for key in (
        "mlm_loss", "unigram_loss", "mlm_accuracy", "nsp_accuracy")}])  # fmt: skip
    print(record.render("scores"))


if __name__ == "__main__":
    main()
