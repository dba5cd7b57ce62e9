"""Tables of the results that benchmarks wrote, each with the line that says where, when and with what."""

import json
import re
from pathlib import Path
from typing import Any

import record

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
REFERENCE = BENCHMARKS / "reference_cpu"
STUDY = BENCHMARKS / "small_study"

WIKIPEDIA_GB = 22
"""Plain text of English Wikipedia: card of AMead10/wikipedia_20240320_en."""
BYTES_OF_A_TOKEN = 2
"""In a prepared dataset with at most 65,536 pieces."""

GPU_PARTS = {
    "check": "`bert-jax check`",
    "parity": "Errors of the training step, beside the fp32 step on the CPU",
    "determinism": "Two runs of the same steps",
    "speed": "BERT-LARGE's training step, with the largest batch that fits",
    "attention": "Attention kernels",
    "remat": "Rematerialization",
    "torch": "Beside `transformers` in torch",
    "curve": "BERT-BASE, pre-trained",
}
"""Headings, by part of benchmarks/gpu.py."""

REFERENCE_STEPS = (1000, 2000, 4000, 6000, 8000, 9000, 10_000, 12_000, 14_000, 16_000, 18_000, 20_000)
REFERENCE_COLUMNS = {
    "step": "{step:,}",
    "sequence length": "{seq_len}",
    "M tokens (padding counted)": "{tokens_m:.1f}",
    "MLM loss": "{mlm_loss:.2f}",
    "unigram baseline": "{unigram_loss:.2f}",
    "MLM accuracy": "{mlm_accuracy:.1%}",
    "NSP loss": "{nsp_loss:.2f}",
    "NSP accuracy": "{nsp_accuracy:.1%}",
}
FINAL_COLUMNS = {name: REFERENCE_COLUMNS[name] for name in list(REFERENCE_COLUMNS)[3:]}


def result_values() -> dict[str, Any]:
    """Returns the single numbers of all results by name of the benchmark, and in `tables` the rows of its tables."""
    found = {}
    for path in record.RESULTS.glob("*.json"):
        content = record.read(path.stem)
        found[path.stem] = content["values"] | {
            "tables": {name: table["rows"] for name, table in content["tables"].items()}
        }
    return found | {"reference_cpu": _read(REFERENCE / "evaluation.json"), "english_wikipedia": english_wikipedia()}


def english_wikipedia() -> dict[str, float]:
    """Returns what preparing `WIKIPEDIA_GB` of text takes by the measured rates: tokens, hours of a core, gigabytes."""
    measured = record.read("prepare_memory")["tables"]["memory"]["rows"][0]
    rows = record.read("data_pipeline")["tables"]["rates"]["rows"]
    rate = next(row["per_second"] for row in rows if "bert-jax prepare" in row["quantity"])
    bytes_per_token = measured["text_gb"] / measured["tokens_g"]
    tokens = WIKIPEDIA_GB / bytes_per_token
    return {
        "tokens_per_second": rate, "bytes_per_token": bytes_per_token, "tokens_g": tokens,
        "hours": 1e9 * tokens / rate / 3600, "dataset_gb": BYTES_OF_A_TOKEN * tokens,
    }  # fmt: skip


def pages() -> dict[str, str]:
    """Returns, by file name, a part for each table: `NAME.TABLE.md`; and the line `NAME.provenance.md`."""
    found = {
        "reference_cpu.evaluations.md": reference_evaluations(),
        "reference_cpu.final.md": record.render(
            {"columns": FINAL_COLUMNS, "rows": [_read(REFERENCE / "evaluation.json")]}
        )
        + "\n",
        "small_study.scores.md": _below_title(STUDY / "table.md"),
    }
    found["gpu.section.md"] = gpu_section()
    for path in sorted(record.RESULTS.glob("*.json")):
        content = record.read(path.stem)
        for name, table in content["tables"].items():
            found[f"{path.stem}.{name}.md"] = record.render(table) + "\n"
        found[f"{path.stem}.provenance.md"] = record.provenance(content) + "\n"
    return found


def gpu_section() -> str:
    """Returns the tables of all parts of the GPU benchmark that have results, or a line that says that none has."""
    parts = []
    for name, heading in GPU_PARTS.items():
        if not (record.RESULTS / f"gpu_{name}.json").exists():
            continue
        content = record.read(f"gpu_{name}")
        tables = [record.render(table) for table in content["tables"].values()]
        parts.append("\n\n".join([f"**{heading}**", *tables, record.provenance(content)]))
    return "\n\n".join(parts or ["No run on a GPU is on record."]) + "\n"


def reference_evaluations() -> str:
    """Returns the table of the reference run's evaluations, at `REFERENCE_STEPS`."""
    rows, tokens, before, seq_len = [], 0.0, 0, 0
    for line in (REFERENCE / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("split") == "eval":
            if row["step"] in REFERENCE_STEPS:
                rows.append(row | {"tokens_m": tokens / 1e6, "seq_len": seq_len})
        elif "tokens_per_second" in row:
            seq_len = round(row["tokens_per_second"] / row["examples_per_second"])
            batch = 64 if seq_len == 32 else 16  # benchmarks/reference_cpu.py
            tokens += (row["step"] - before) * batch * seq_len
            before = row["step"]
    return record.render({"columns": REFERENCE_COLUMNS, "rows": rows}) + "\n"


def _read(path: Any) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _below_title(path: Any) -> str:
    """Returns a page in Markdown without its title, with its headings in bold, for any place of another page."""
    _, _, text = path.read_text(encoding="utf-8").partition("\n\n")
    return re.sub(r"^#+ (.*)$", r"**\1**", text, flags=re.MULTILINE)
