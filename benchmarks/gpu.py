"""Runs everything that only a GPU can show, in order of worth and until a deadline; benchmarks/gpu.sh is its command.

    benchmarks/gpu.sh [--minutes 10] [--only PART,PART] [--json-folder FOLDER] [--data DATASET] [--rehearse]

Parts, each a process of its own that writes gpu_PART.json into the folder after every case:

    check        `bert-jax check`: the machine trains, resumes and agrees with its CPU
    parity       the training step beside the CPU's: losses, gradient norm, updated parameters
    determinism  two runs, two processes, with --xla_gpu_deterministic_ops=true and without
    speed        BERT-LARGE at 128 and 512 tokens, unpacked and packed: the largest batch that fits
    attention    attention kernels, with and without dropout
    remat        what the backward pass recomputes
    torch        `transformers` BertForPreTraining with SDPA and torch.compile beside it, a round of each in turn
    curve        pre-training of BERT-BASE with the time that is left

A rerun skips what is recorded for the same code, device and jax. A case that fails or runs out of memory is recorded as
such, and the next one follows; a rerun repeats the failed ones. A part stops at its time budget, which grows with
--minutes, and all stop at --minutes. `--rehearse` runs all parts with tiny models on the CPU, and writes into
WORK/rehearsal.

The exit status is 0 if all parts that can run are complete, 75 if a rerun would continue, 1 if a part or a case failed,
and 2 without a GPU.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from on_gpu.cases import (
    CRASHED,
    FRESH_PROCESS,
    INTERRUPTED,
    OUT_OF_TIME,
    Cases,
    FreshProcessError,
    OutOfTimeError,
    end_running,
    is_failed,
    is_same,
)
from on_gpu.scale import FULL, REHEARSAL
from record import REPOSITORY, RESULTS, Record, code_digest

SCRIPT = Path(__file__).resolve()
STEP = ("jax", "flax", "optax", "ml_collections", "numpy")
"""Packages that a training step needs."""
RUN = (*STEP, "orbax.checkpoint", "array_record", "sentencex", "tokenizers", "tqdm")
"""Packages that a run needs: all of bert_jax."""
MEASURES = (
    "benchmarks/gpu.py", "benchmarks/on_gpu", "benchmarks/torch_batch.py", "bert_jax/batch.py", "bert_jax/data/loading",
    "bert_jax/device_check.py",
    "bert_jax/model", "bert_jax/parallel", "bert_jax/tracking/flops.py",
    "bert_jax/training/objectives.py", "bert_jax/training/optimizer.py",
    "bert_jax/training/train_step.py",
)  # fmt: skip
CUDA_PACKAGES = (
    "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "torch", "transformers"
)  # fmt: skip
COMPILE_QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA's flags for the rehearsal, whose programs run for less time than they compile."""
GRACE = 30
"""Seconds that a part has to save its state at the deadline."""


@dataclass(frozen=True)
class Part:
    """Part of the benchmark.

    Attributes:
      name: name of the part.
      needs: modules that it imports.
      minutes: its time budget if all parts have ten minutes.
      text: modules whose documentation it trains on, without --data and --rehearse.
    """

    name: str
    needs: tuple[str, ...]
    minutes: float
    text: tuple[str, ...] = ()

    def missing(self, options: argparse.Namespace) -> list[str]:
        """Returns the modules that cannot be found."""
        has_text = options.data or options.rehearse
        return missing(self.needs if has_text else (*self.needs, *self.text))


PARTS = (
    Part("check", (*RUN, "safetensors"), 3.0),
    Part("parity", STEP, 2.0),
    Part("determinism", STEP, 1.5),
    Part("speed", STEP, 4.0),
    Part("attention", STEP, 3.0),
    Part("remat", STEP, 4.0),
    Part("torch", (*STEP, "torch", "transformers"), 3.0),
    Part(
        "curve", RUN, 15.0, text=("matplotlib", "scipy"),
    ),
)  # fmt: skip


# --- The processes of the parts ------------------------------------------------------------------------------------


def run_part(options: argparse.Namespace) -> int:
    """Measures a part in this process; returns its exit status."""
    # Ends by itself, with its workers, if the process that would stop it was killed.
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.alarm(max(1, round(options.deadline - time.time())) + 2 * GRACE)
    key, scale = json.loads(options.key), REHEARSAL if options.rehearse else FULL
    packages = [name for name in CUDA_PACKAGES if _installed(name)]
    record = Record(
        options.json_folder / f"gpu_{options.name}.json", MEASURES, packages,
        command=f"bash benchmarks/gpu.sh --only {options.name}", device=key["device"],
    )  # fmt: skip
    extra = ["--rehearse"] if options.rehearse else []

    def cases(columns: dict[str, str]) -> Cases:
        return Cases(record, columns, key, options.deadline, options.call)

    def measure() -> None:
        if options.name in ("parity", "determinism"):
            from on_gpu import agreement

            if options.name == "parity":
                agreement.parity(cases(agreement.PARITY_COLUMNS), scale)
            else:
                agreement.determinism(cases(agreement.DETERMINISM_COLUMNS), scale, SCRIPT, extra)
        elif options.name == "check":
            from on_gpu import first_check

            first_check.check(cases(first_check.COLUMNS), options.work)
        elif options.name == "torch":
            from on_gpu import beside_torch

            beside_torch.beside_torch(cases(beside_torch.COLUMNS), scale, SCRIPT, extra)
        elif options.name == "curve":
            from on_gpu import curve

            found = cases(curve.SUMMARY_COLUMNS)
            curve.curve(found, record, scale, options.work, options.data, options.curve_minutes, options.deadline)
        else:
            from on_gpu import speed

            function, columns = {
                "speed": (speed.step_times, speed.STEP_COLUMNS),
                "attention": (speed.attention, speed.ATTENTION_COLUMNS),
                "remat": (speed.remat, speed.REMAT_COLUMNS),
            }[options.name]
            function(cases(columns), scale)

    return run_cases(record, key, measure)


def run_cases(record: Record, key: dict[str, str], measure: Callable[[], None]) -> int:
    """Measures the cases of a part, and returns the exit status of its process.

    The part is complete, as the record then says, unless a case failed or was interrupted.
    """
    try:
        measure()
    except OutOfTimeError:
        return OUT_OF_TIME
    except FreshProcessError:
        return FRESH_PROCESS
    rows = record.content["tables"]["cases"]["rows"]
    if any(row["outcome"] == INTERRUPTED for row in rows):
        return OUT_OF_TIME
    if not any(map(is_failed, rows)):
        record.content["complete"] = key
        record.write()
    return 0


def run_worker(options: argparse.Namespace) -> int:
    """Runs one of several processes of a part."""
    scale = REHEARSAL if options.rehearse else FULL
    if options.name == "determinism":
        from on_gpu import agreement

        agreement.determinism_worker(scale)
        return 0
    from on_gpu import beside_torch

    if options.name == "jax":
        beside_torch.jax_worker(scale, options.seq_len)
    else:
        beside_torch.torch_worker(scale, options.seq_len, on_cpu=options.rehearse)
    return 0


def probe(_: argparse.Namespace) -> int:
    """Prints the device that jax finds, as JSON."""
    import jax

    device = jax.devices()[0]
    print(json.dumps({"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}))
    return 0


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# --- The process that starts them ----------------------------------------------------------------------------------


def missing(names: Sequence[str]) -> list[str]:
    """Returns the modules that cannot be found."""
    return [name for name in names if importlib.util.find_spec(name.split(".")[0]) is None]


def run_all(options: argparse.Namespace) -> int:
    """Runs the parts in turn; returns the exit status."""
    deadline = time.time() + 60 * options.minutes
    if options.rehearse:
        options.work /= "rehearsal"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the part's process as well
    environment = _environment(options)
    if missing(("jax",)):
        print("jax is not installed; run: pip install 'jax[cuda13]' (NVIDIA driver 580 or later) or 'jax[cuda12]'")
        return 2
    found = subprocess.run(
        [sys.executable, str(SCRIPT), "probe"], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if found.returncode:
        print("jax cannot open its device; its error is above")
        return 2
    device = json.loads(found.stdout.splitlines()[-1])
    if device["platform"] not in ("gpu", "cuda", "rocm") and not options.rehearse:
        print(
            f"jax {device['jax']} found no GPU, only {device['device']}; run: pip install 'jax[cuda13]' or "
            "'jax[cuda12]', or rehearse on the CPU with --rehearse"
        )
        return 2
    key = {"device": device["device"], "jax": device["jax"], "code": code_digest(MEASURES)}
    print(f"{key['device']}, jax {key['jax']}, code {key['code']}; results go to {options.json_folder}", flush=True)
    chosen = [part for part in PARTS if not options.only or part.name in options.only]
    absent = {name for part in chosen for name in part.missing(options)}
    skipped = [part.name for part in chosen if part.missing(options)]
    if absent:
        print(f"not installed: {', '.join(sorted(absent))}; skipped: {', '.join(skipped)}", flush=True)
    outcomes = {
        part.name: _run(part, options, key, deadline, environment) for part in chosen if part.name not in skipped
    }
    print("; ".join(f"{name}: {outcome}" for name, outcome in outcomes.items()))
    unfinished = [outcome for outcome in outcomes.values() if outcome == INTERRUPTED]
    failed = [outcome for outcome in outcomes.values() if outcome.startswith("failed")]
    return 1 if failed else OUT_OF_TIME if unfinished else 0


def _environment(options: argparse.Namespace) -> dict[str, str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # a read of the cache is no compilation
    if options.rehearse:
        environment["JAX_PLATFORMS"] = "cpu"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {COMPILE_QUICKLY}".strip()
    elif platforms := environment.get("JAX_PLATFORMS"):  # parity compares with the CPU
        environment["JAX_PLATFORMS"] = platforms if "cpu" in platforms.split(",") else f"{platforms},cpu"
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    return environment


def _run(part: Part, options: argparse.Namespace, key: dict, deadline: float, environment: dict[str, str]) -> str:
    """Runs a part until all cases were tried or the time is over, and returns its outcome.

    A crashed case is not repeated, a failed one only by the next call.
    """
    path, call = options.json_folder / f"gpu_{part.name}.json", uuid.uuid4().hex
    until = min(deadline, time.time() + 60 * part.minutes * max(1.0, options.minutes / 10))
    while True:
        if is_complete(path, key):
            return "complete"
        if time.time() >= until:
            return INTERRUPTED
        print(f"{part.name}: at most {(until - time.time()) / 60:.1f} minutes", flush=True)
        status = _run_process(part, options, key, call, until, environment)
        if status == FRESH_PROCESS:
            continue
        if status == OUT_OF_TIME:
            end_running(path, INTERRUPTED)
            return INTERRUPTED
        if status == 0:
            return "complete" if is_complete(path, key) else "failed in some cases"
        crashed = end_running(path, CRASHED)
        print(f"  {crashed or part.name}: ended with status {status}", flush=True)
        if crashed is None:  # not in a case: a rerun would end alike
            return f"failed with status {status}"


def _run_process(
    part: Part, options: argparse.Namespace, key: dict, call: str, until: float, environment: dict[str, str]
) -> int:
    """Returns the exit status of a part's process, `OUT_OF_TIME` if it had to be stopped.

    The curve, which saves its state, gets SIGTERM `GRACE` seconds before `until`, the others at `until`.
    """
    grace = min(GRACE, (until - time.time()) / 4) if part.name == "curve" else 0.0
    command = [
        sys.executable, str(SCRIPT), "part", part.name, "--key", json.dumps(key), "--call", call,
        "--deadline", str(until - grace), "--json-folder", str(options.json_folder), "--work", str(options.work),
        "--data", options.data, "--curve-minutes", str(options.curve_minutes),
        *(["--rehearse"] if options.rehearse else []),
    ]  # fmt: skip
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(timeout=max(0.0, until - grace - time.time()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(grace, 5.0))
        return OUT_OF_TIME
    finally:
        with contextlib.suppress(ProcessLookupError):  # the process or its workers, if any is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_complete(path: Path, key: dict[str, Any]) -> bool:
    """Returns whether all cases of a part are recorded for `key`."""
    if not path.exists():
        return False
    complete = json.loads(path.read_text(encoding="utf-8")).get("complete")
    return complete is not None and is_same(complete, key)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (("all", run_all), ("part", run_part), ("worker", run_worker), ("probe", probe)):
        command = commands.add_parser(
            name, help="all parts" if name == "all" else "a process of `all`", description=__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.set_defaults(function=function)
        if name in ("part", "worker"):
            command.add_argument("name")
        if name != "probe":
            command.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
        if name in ("all", "part"):
            command.add_argument("--json-folder", type=Path, help="results (default: benchmarks/results)")
            command.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "gpu", help="data and runs")
            command.add_argument("--data", default="", help="prepared dataset of 128 tokens for the curve")
            command.add_argument("--curve-minutes", type=float, default=12.0, help="duration of the curve (default 12)")
    commands.choices["all"].add_argument("--minutes", type=float, default=10.0, help="deadline of all parts")
    commands.choices["all"].add_argument(
        "--only", type=lambda text: text.split(","), default=[], help="parts, separated by commas"
    )
    commands.choices["part"].add_argument("--key", required=True)
    commands.choices["part"].add_argument("--call", required=True)
    commands.choices["part"].add_argument("--deadline", type=float, required=True)
    commands.choices["worker"].add_argument("--seq-len", type=int, default=128)
    options = parser.parse_args()
    if unknown := set(getattr(options, "only", [])) - {part.name for part in PARTS}:
        parser.error(f"--only={','.join(sorted(unknown))}: expected {', '.join(part.name for part in PARTS)}")
    if getattr(options, "json_folder", "") is None:
        options.json_folder = options.work / "rehearsal" if options.rehearse else RESULTS
    return options.function(options)


if __name__ == "__main__":
    sys.exit(main())
