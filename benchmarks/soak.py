"""Trains for hours with a checkpoint every minute, and shows that memory, handles, threads and disk do not grow.

    python benchmarks/soak.py [--hours 3] [--folder runs/soak]
    python benchmarks/soak.py --hours 3 --resume   # resumes a run that was stopped, until it has run for 3 hours
    python benchmarks/soak.py --only_report        # evaluates the samples of a run that continues or was stopped

One `bert-jax pretrain` of bert_tiny saves and evaluates about every minute and logs every few seconds, while `bert-jax
report` reads its workdir again and again. Every ten seconds FOLDER/samples.jsonl gets a row with the memory, handles
and threads of the run and the sizes of its folders. At the end the run is stopped with SIGTERM, and must end with 75.

The first tenth of the samples is warm-up. Memory goes up and down with every evaluation and save, so that peaks are
compared: a quantity is flat if its 95th percentile in the last third is at most 2% above that of the first third. A
save in progress has files and threads of its own, and the machine's speed decides how often one is seen: of these the
lowest value is compared, which is what remains between saves.

By design metrics and TensorBoard events grow by a constant amount per logged row, and with them the memory of `report`,
which draws all rows. Ends with status 1 if something else grows.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from record import REPOSITORY, Record, add_json_argument

MEASURES = ("bert_jax",)
PLOT = Path(__file__).parents[1] / "docs" / "images" / "soak.svg"
INTERVAL, WARM_UP, GROWTH = 10.0, 0.1, 0.02
FILES, THREADS = "files in the workdir", "threads of the run"
GROWS = "memory of `report`, MiB"
MIB = 1 << 20
QUANTITIES = {
    "memory of the run, MiB": "memory_mib",
    "handles of the run": "handles",
    THREADS: "threads",
    "checkpoints, MiB": "checkpoints_mib",
    FILES: "files",
    "temporary files and caches, MiB": "temporary_mib",
    "memory of `report`, MiB": "report_mib",
}
COLUMNS = {
    "quantity": "{quantity}",
    "mean": "{mean:,.1f}",
    "lowest": "{lowest:,.1f}",
    "first third": "{first:,.1f}",
    "last third": "{last:,.1f}",
    "growth": "{growth:+.1%}",
}


def main() -> int:
    options = _parser().parse_args()
    folder = options.folder.absolute()
    if not options.only_report:
        if not options.resume:
            shutil.rmtree(folder, ignore_errors=True)
        run(folder, options.hours)
    samples = _samples(folder)
    rows = evaluate(samples)
    record = Record(options.json, MEASURES)
    record.set_table("flatness", COLUMNS, rows)
    last = samples[-1]
    record.set_values(
        hours=last["seconds"] / 3600, samples=len(samples), processes=last.get("process", 0) + 1,
        steps=last["step"], reports=last["reports"],
        saves=len({sample["saved_step"] for sample in samples} - {0}), evaluations=last["evaluations"],
        bytes_per_row=last["log_bytes"] / last["rows"],
    )  # fmt: skip
    draw(samples, options.plot)
    print(record.render("flatness"))
    return int(not all(row["is_flat"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder, in a new process")
    parser.add_argument("--only_report", action="store_true", help="start no run")
    parser.add_argument("--plot", type=Path, default=PLOT)
    add_json_argument(parser, "soak")
    return parser


def run(folder: Path, hours: float) -> None:
    """Runs `bert-jax pretrain` for so long in all, and appends to FOLDER/samples.jsonl."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TMPDIR": f"{folder}/tmp", "BERT_JAX_CACHE": f"{folder}/cache"}
    earlier = _samples(folder)
    if earlier:
        steps = json.loads((folder / "run" / "config.json").read_text(encoding="utf-8"))["checkpoint"]["every_steps"]
    else:
        steps = _make_inputs(folder, environment)
    print(f"a checkpoint every {steps} steps", flush=True)
    last = earlier[-1] if earlier else {"seconds": 0.0, "reports": 0, "report_mib": None}
    process = last.get("process", 0) + 1 if earlier else 0
    training = _start(folder, environment, "run", total_steps=10**8, checkpoint__every_steps=steps,
                      eval_every_steps=steps, eval_batches=20, log_every_steps=max(1, steps // 20))  # fmt: skip
    began, reports, report, report_mib = time.monotonic() - last["seconds"], last["reports"], None, last["report_mib"]
    due = last["seconds"] + 60
    with (folder / "samples.jsonl").open("a", encoding="utf-8") as journal:
        while (seconds := time.monotonic() - began) < 3600 * hours:
            if training.poll() is not None:
                raise RuntimeError(f"the run ended with status {training.returncode}; see {folder}/run.log")
            if report is None and seconds > due:
                report = _report(folder, environment)
            if report is not None:
                pid, status, usage = os.wait4(report.pid, os.WNOHANG)
                if pid:
                    if status:
                        raise RuntimeError(f"report ended with status {status}; see {folder}/report.log")
                    report, reports, report_mib, due = None, reports + 1, usage.ru_maxrss / 1024, seconds + 60
            sample = {"process": process, "seconds": seconds, "reports": reports, "report_mib": report_mib}
            journal.write(json.dumps(sample | _of_process(training.pid) | _of_folders(folder)) + "\n")
            journal.flush()
            time.sleep(INTERVAL)
    training.send_signal(signal.SIGTERM)
    if (status := training.wait(300)) != 75:
        raise RuntimeError(f"the run ended with status {status} after SIGTERM, not 75")
    if report is not None:
        report.wait(300)


def _samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _lines(folder / "samples.jsonl")]


def _make_inputs(folder: Path, environment: dict[str, str]) -> int:
    """Prepares the dataset, and returns the steps of a minute."""
    (folder / "tmp").mkdir(parents=True)
    script = REPOSITORY / "launch" / "python_docs.py"
    subprocess.run([sys.executable, script, folder / "text", "python"], check=True)
    _call(environment, folder, "vocab", f"--input={folder}/text", f"--output={folder}/tokenizer.json", "--size=2048")
    _call(environment, folder, "prepare", f"--input={folder}/text", f"--vocab={folder}/tokenizer.json",
          f"--output={folder}/data", "--seq_len=64", "--eval_fraction=0.05")  # fmt: skip
    return _steps_per_minute(folder, environment)


def _call(environment: dict[str, str], folder: Path, *words: str) -> None:
    with (folder / "inputs.log").open("ab") as log:
        subprocess.run([sys.executable, "-m", "bert_jax.cli", *words], env=environment, check=True, stdout=log,
                       stderr=log)  # fmt: skip


def _start(folder: Path, environment: dict[str, str], name: str, **settings: object) -> subprocess.Popen:
    flags = [f"--config.{key.replace('__', '.')}={value}" for key, value in settings.items()]
    words = ["pretrain", "--config=bert_tiny", f"--workdir={folder}/{name}", f"--config.data.path={folder}/data"]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "bert_jax.cli", *words, *flags], env=environment, stdout=log,
                                stderr=log)  # fmt: skip


def _steps_per_minute(folder: Path, environment: dict[str, str]) -> int:
    """Returns the steps of a minute, of a run of 600 steps."""
    if _start(folder, environment, "pace", total_steps=600, log_every_steps=100).wait():
        raise RuntimeError(f"the first run failed; see {folder}/pace.log")
    lines = (folder / "pace" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    times = [row["tokens_per_second"] for row in map(json.loads, lines) if "tokens_per_second" in row]
    return max(10, round(60 * statistics.median(times) / (16 * 64)))


def _report(folder: Path, environment: dict[str, str]) -> subprocess.Popen:
    with (folder / "report.log").open("ab") as log:
        words = [sys.executable, "-m", "bert_jax.cli", "report", f"{folder}/run", f"--output={folder}/report.html"]
        return subprocess.Popen(words, env=environment, stdout=log, stderr=log)


def _of_process(pid: int) -> dict[str, Any]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "memory_mib": int(status["VmRSS"].split()[0]) / 1024,
        "threads": int(status["Threads"]),
        "handles": len(os.listdir(f"/proc/{pid}/fd")),
    }


def _of_folders(folder: Path) -> dict[str, Any]:
    sizes = dict(_sizes(folder / "run"))
    checkpoints = {
        Path(*path.parts[: path.parts.index("checkpoints") + 2]) for path in sizes if "checkpoints" in path.parts
    }
    logs = [path for path in sizes if path.name == "metrics.jsonl" or ".tfevents." in path.name]
    metrics = folder / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in _lines(metrics)]
    evaluations = [row["step"] for row in rows if row.get("split") == "eval"]
    return {
        "checkpoints_mib": sum(size for path, size in sizes.items() if "checkpoints" in path.parts) / MIB,
        "files": len(sizes),
        "temporary_mib": sum(size for name in ("tmp", "cache") for _, size in _sizes(folder / name)) / MIB,
        "log_bytes": sum(sizes[path] for path in logs),
        "rows": max(1, len(rows)),
        "step": max((row["step"] for row in rows), default=0),
        "evaluations": len(evaluations),
        "saved_step": max((int(path.parts[-1]) for path in checkpoints if path.name.isdigit()), default=0),
    }


def _sizes(folder: Path) -> list[tuple[Path, int]]:
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            try:
                found.append((path, path.stat().st_size))
            except FileNotFoundError:  # deleted meanwhile
                continue
    return found


def _lines(path: Path) -> list[str]:
    """Returns the complete lines of a file that grows."""
    return path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines() if path.exists() else []


def evaluate(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each of `QUANTITIES`: its peaks after the warm-up, and whether it is flat."""
    rows = []
    kept = samples[int(WARM_UP * len(samples)) :]
    for quantity, key in QUANTITIES.items():
        values = [sample[key] for sample in kept if sample[key] is not None]
        if len(values) < 3:
            continue
        third = len(values) // 3
        percentile = 0 if quantity in (FILES, THREADS) else 95
        first, last = (float(np.percentile(part, percentile)) for part in (values[:third], values[-third:]))
        rows.append(
            {
                "quantity": quantity, "mean": statistics.mean(values), "lowest": min(values), "first": first,
                "last": last, "growth": last / first - 1, "is_flat": quantity == GROWS or last <= (1 + GROWTH) * first,
            }
        )  # fmt: skip
    return rows


def draw(samples: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws each quantity over the hours to an SVG."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(4, 2, sharex=True).flatten()
    for axis, (quantity, key) in zip(axes, QUANTITIES.items(), strict=False):
        points = [(sample["seconds"] / 3600, sample[key]) for sample in samples if sample[key] is not None]
        axis.plot(*np.array(points).T, linewidth=0.8)
        axis.set_ylim(bottom=0)
        axis.set_title(quantity.replace("`", ""), fontsize=9)
    axes[-1].plot(*np.array([(sample["seconds"] / 3600, sample["rows"]) for sample in samples]).T, linewidth=0.8)
    axes[-1].set_title("logged rows", fontsize=9)
    for axis in axes[-2:]:
        axis.set_xlabel("hours")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
