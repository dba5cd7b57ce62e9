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

A rerun skips what is recorded for the same code, device and jax. A case that fails, crashes or runs out of memory is
recorded as such, and the next one follows. A part stops at its time budget, which grows with --minutes, and all stop at
--minutes. `--rehearse` runs all parts with tiny models on the CPU, and writes into WORK/rehearsal.

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
from pathlib import Path

from on_gpu.cases import FRESH_PROCESS, OUT_OF_TIME, Cases, FreshProcessError, OutOfTimeError, drop_running
from on_gpu.scale import FULL, REHEARSAL
from record import REPOSITORY, RESULTS, Record, code_digest

STEP = ("jax", "flax", "optax", "ml_collections", "numpy")
"""Packages that a training step needs."""
RUN = (*STEP, "orbax.checkpoint", "array_record", "sentencex", "tokenizers", "tqdm")
"""Packages that a run needs: all of bert_jax."""
MEASURES = (
    "benchmarks/gpu.py", "benchmarks/on_gpu", "benchmarks/processes.py", "benchmarks/torch_side.py",
    "bert_jax/batch.py", "bert_jax/data/loading", "bert_jax/device_check.py", "bert_jax/model", "bert_jax/parallel",
    "bert_jax/tracking/throughput.py", "bert_jax/training/objectives.py", "bert_jax/training/optimizer.py",
    "bert_jax/training/train_step.py",
)  # fmt: skip
CUDA_PACKAGES = (
    "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "torch", "transformers"
)  # fmt: skip
COMPILE_QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA's flags for the rehearsal, whose programs run for less time than they compile."""
MOST_PROCESSES = 20
"""Of a part whose cases crash."""
PARTS = {
    "check": ((*RUN, "safetensors"), 3.0),
    "parity": (STEP, 2.0),
    "determinism": (STEP, 1.5),
    "speed": (STEP, 4.0),
    "attention": (STEP, 3.0),
    "remat": (STEP, 4.0),
    "torch": ((*STEP, "torch", "transformers"), 3.0),
    "curve": ((*RUN, "matplotlib", "scipy"), 15.0),
}
"""Packages that a part needs, and its minutes of ten for all. The text of the curve is that of the last two."""
PROBE = "import jax, json; device = jax.devices()[0]; print(json.dumps([device.device_kind, device.platform]))"


def run_part(options: argparse.Namespace) -> int:
    """Measures a part in this process; returns its exit status."""
    import jax
    from on_gpu import agreement, beside_torch, curve, first_check, speed

    key = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "code": code_digest(MEASURES)}
    record = Record(
        options.json_folder / f"gpu_{options.part}.json", MEASURES, list(filter(_is_installed, CUDA_PACKAGES)),
        command=f"bash benchmarks/gpu.sh --only {options.part}", device=key["device"],
    )  # fmt: skip
    scale = REHEARSAL if options.rehearse else FULL
    columns, measure = {
        "check": (first_check.COLUMNS, lambda cases: first_check.check(cases, options.work)),
        "parity": (agreement.PARITY_COLUMNS, lambda cases: agreement.parity(cases, scale)),
        "determinism": (agreement.DETERMINISM_COLUMNS, lambda cases: agreement.determinism(cases, scale)),
        "speed": (speed.STEP_COLUMNS, lambda cases: speed.step_times(cases, scale)),
        "attention": (speed.ATTENTION_COLUMNS, lambda cases: speed.attention(cases, scale)),
        "remat": (speed.REMAT_COLUMNS, lambda cases: speed.remat(cases, scale)),
        "torch": (beside_torch.COLUMNS, lambda cases: beside_torch.beside_torch(cases, scale)),
        "curve": (
            curve.SUMMARY_COLUMNS, lambda cases: curve.curve(cases, record, scale, options.work, options.data)
        ),
    }[options.part]  # fmt: skip
    cases = Cases(record, columns, key, options.deadline)
    try:
        measure(cases)
    except OutOfTimeError:
        return OUT_OF_TIME
    except FreshProcessError:
        return FRESH_PROCESS
    return 0 if cases.is_complete else 1


def _is_installed(package: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(package))
    return False


def run_all(options: argparse.Namespace) -> int:
    """Runs the parts in turn; returns the exit status."""
    deadline = time.time() + 60 * options.minutes
    os.environ |= {"PYTHONUNBUFFERED": "1"} | environment(options.rehearse)
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a read of the cache is no compilation
    found = subprocess.run([sys.executable, "-c", PROBE], stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode:
        print("jax cannot open its device: its error is above; install it with pip install 'jax[cuda13]'")
        return 2
    device, platform = json.loads(found.stdout.splitlines()[-1])
    if platform not in ("gpu", "cuda", "rocm") and not options.rehearse:
        print(f"jax found no GPU, only {device}; run: pip install 'jax[cuda13]' (NVIDIA driver 580 or later) or "
              "'jax[cuda12]', or rehearse on the CPU with --rehearse")  # fmt: skip
        return 2
    print(f"{device}; results go to {options.json_folder}", flush=True)
    outcomes = {}
    for name, (needed, minutes) in PARTS.items():
        if options.only and name not in options.only:
            continue
        absent = [package for package in needed if importlib.util.find_spec(package.split(".")[0]) is None]
        until = min(deadline, time.time() + 60 * minutes * max(1.0, options.minutes / 10))
        if absent:
            print(f"{name}: skipped, not installed: {', '.join(absent)}")
        else:
            outcomes[name] = run_part_until(name, options, until)
    print("; ".join(f"{name}: status {status}" for name, status in outcomes.items()))
    return next((status for status in (1, OUT_OF_TIME) if status in outcomes.values()), 0)


def environment(rehearse: bool) -> dict[str, str]:
    """Returns variables for the processes of the parts."""
    if rehearse:
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {COMPILE_QUICKLY}".strip()}
    found = {"XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")}
    if (platforms := os.environ.get("JAX_PLATFORMS")) and "cpu" not in platforms:  # parity compares with the CPU
        found["JAX_PLATFORMS"] = f"{platforms},cpu"
    return found


def run_part_until(name: str, options: argparse.Namespace, until: float) -> int:
    """Runs a part in fresh processes while its cases crash; returns 0, 1, or `OUT_OF_TIME` at the Unix time `until`."""
    for _ in range(MOST_PROCESSES):
        if time.time() >= until:
            return OUT_OF_TIME
        print(f"{name}: at most {(until - time.time()) / 60:.1f} minutes", flush=True)
        command = [sys.executable, __file__, *sys.argv[1:], "--part", name, "--deadline", str(until)]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            status = process.wait(timeout=until - time.time())
        except subprocess.TimeoutExpired:
            status = OUT_OF_TIME
        finally:
            with contextlib.suppress(ProcessLookupError):  # the process or its workers, if any is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status == OUT_OF_TIME:
            drop_running(options.json_folder / f"gpu_{name}.json")
        if status in (0, 1, OUT_OF_TIME):
            return status
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="deadline of all parts")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="parts, separated by commas")
    parser.add_argument("--json-folder", type=Path, help="results (default: benchmarks/results)")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "gpu", help="data and runs")
    parser.add_argument("--data", default="", help="prepared dataset of 128 tokens for the curve")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    for name, kind in {"--part": str, "--deadline": float}.items():  # processes of this one
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only={','.join(sorted(unknown))}: expected {', '.join(PARTS)}")
    if options.rehearse:
        options.work /= "rehearsal"
    options.json_folder = options.json_folder or (options.work if options.rehearse else RESULTS)
    return run_part(options) if options.part else run_all(options)


if __name__ == "__main__":
    sys.exit(main())
