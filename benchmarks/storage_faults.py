"""Has the disk fail under every command that writes, at a random call, and compares what the next run leaves.

    python benchmarks/storage_faults.py [--rounds 2] [--folder runs/storage_faults] [--cases pretrain vocab ...]

A library below the C library's read and write makes a random call of a command fail, and all that follow: a full disk,
an exceeded quota, input and output errors, writes that are cut short. Then the command runs again on a disk that works.
Its output must equal that of an undisturbed run, file by file and array by array. The run under the fault must end
with one line, or as if nothing had happened; one that ends with status 0 must have written the same.

Each trial is a line of FOLDER/trials.jsonl: the same command continues until each pair of command and fault has
`--rounds`, and repeats what went wrong in earlier code. Ends with status 1 after a traceback, a hang or a difference.
"""

import argparse
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from killed.cases import CASES
from killed.outcomes import differences, outcome
from kills import LIMIT, Campaign, folder_name
from record import REPOSITORY, Record, add_json_argument

MEASURES = ("bert_jax",)
SOURCE = REPOSITORY / "tests" / "support" / "faulty_disk.c"
FAULTS = {
    "full disk": ("write", errno.ENOSPC),
    "exceeded quota": ("write", errno.EDQUOT),
    "write error": ("write", errno.EIO),
    "read error": ("read", errno.EIO),
    "writes cut short": ("write", 0),
}
COLUMNS = {
    "fault": "{fault}",
    "trials": "{trials}",
    "ended with one line": "{refused}",
    "without effect": "{harmless}",
    "tracebacks": "{tracebacks}",
    "hangs": "{hangs}",
    "outputs compared": "{compared}",
    "different": "{different}",
}
REFUSED, HARMLESS, TRACEBACK, HANG, SILENT = "refused", "harmless", "traceback", "hang", "silent"


class Trials:
    """The commands under faults."""

    def __init__(self, folder: Path):
        self.campaign, self.folder = Campaign(folder), folder
        self._library = folder / "faulty_disk.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", self._library, SOURCE, "-ldl"], check=True)
        self._calls: dict[tuple[str, str], int] = {}

    def run(self, case: str, fault: str, number: int) -> dict[str, Any]:
        """Runs a case under a fault, and again without; returns what happened."""
        call, code = FAULTS[fault]
        rng = random.Random(f"{case} {fault} {number}")
        calls = self._count_calls(case, call)
        after = rng.randrange(max(1, calls))
        trial: dict[str, Any] = {"case": case, "fault": fault, "number": number, "calls": calls, "after": after}
        output = self._output(case, fault, number)
        variables = self._variables(output, call, after) | ({"FAULT_ERRNO": str(code)} if code else {})
        trial |= self._run_faulty(case, output, variables)
        trial["hits"] = max(0, Path(variables["FAULT_LOG"]).stat().st_size - after) if calls else 0
        expected = self.campaign.undisturbed[case]
        if trial["verdict"] == HARMLESS:
            if differences(outcome(output), expected):
                trial["verdict"] = SILENT
        elif differences(outcome(output), expected):  # else the fault came after the last write
            processes = self.campaign.start(case, output)
            self.campaign.wait(processes)
            if statuses := [process.returncode for process in processes if process.returncode]:
                return trial | {"different": [f"the next run ended with status {statuses[0]}"]}
        trial["different"] = [name for name in differences(outcome(output), expected) if ".damaged" not in name]
        if not trial["different"] and trial["verdict"] in (REFUSED, HARMLESS):
            shutil.rmtree(output.parent)
        return trial

    def _output(self, case: str, fault: str, number: int) -> Path:
        folder = self.folder / "trials" / f"{folder_name(case)}-{folder_name(fault)}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder / folder_name(case)

    def _variables(self, output: Path, call: str, after: int) -> dict[str, str]:
        path = output.parent if call == "write" else self.campaign.inputs
        log = self.folder / f"{output.parent.name}.calls"
        log.unlink(missing_ok=True)
        return {"LD_PRELOAD": str(self._library), "FAULT_CALL": call, "FAULT_PATH": f"{path}/", "FAULT_LOG": str(log),
                "FAULT_AFTER": str(after)}  # fmt: skip

    def _count_calls(self, case: str, call: str) -> int:
        """Returns the number of calls in a run whose calls all work."""
        if (case, call) not in self._calls:
            output = self._output(case, f"counted {call}", 0)
            variables = self._variables(output, call, 1 << 40)
            processes = self.campaign.start(case, output, **variables)
            self.campaign.wait(processes)
            self.campaign.expect_success(case, output, processes)
            log = Path(variables["FAULT_LOG"])
            self._calls[case, call] = log.stat().st_size if log.exists() else 0
            shutil.rmtree(output.parent)
        return self._calls[case, call]

    def _run_faulty(self, case: str, output: Path, variables: dict[str, str]) -> dict[str, Any]:
        began = time.monotonic()
        # The log is outside of the folder under the fault.
        log = self.folder / f"{output.parent.name}.log"
        log.unlink(missing_ok=True)
        processes = self.campaign.start(case, output, log=log, **variables)
        try:
            self.campaign.wait(processes)
        except RuntimeError:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            return {"verdict": HANG, "said": f"after {LIMIT:.0f} s", "seconds": LIMIT}
        statuses = [process.returncode for process in processes]
        text = log.read_text(encoding="utf-8", errors="replace")
        verdict = HARMLESS if not any(statuses) else REFUSED
        if "Traceback (most recent call last)" in text or any(status not in (0, 1, 2) for status in statuses):
            verdict = TRACEBACK
        said = "" if verdict == HARMLESS else text.strip().rpartition("\n")[2]
        return {"verdict": verdict, "statuses": statuses, "said": said[:400], "seconds": time.monotonic() - began}


def main() -> int:
    options = _parser().parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    trials, journal, record = Trials(folder), folder / "trials.jsonl", Record(options.json, MEASURES)
    code = trials.campaign.code
    done = {(trial["case"], trial["fault"], trial["number"]): trial for trial in _read(journal)}
    names = [name for name in options.cases if CASES[name].is_possible]
    for name in names:
        trials.campaign.run_undisturbed(name)
    for number in range(options.rounds):
        for name in names:
            for fault in FAULTS:
                key = (name, fault, number)
                if key in done and not (_is_wrong(done[key]) and done[key]["code"] != code):
                    continue
                done[key] = trials.run(name, fault, number) | {"code": code}
                with journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[key]) + "\n")
                print(_line(done[key]), flush=True)
                _write(record, list(done.values()))
    _write(record, list(done.values()))
    print(record.render("faults"))
    return int(any(map(_is_wrong, done.values())))


def _is_wrong(trial: dict[str, Any]) -> bool:
    return trial["verdict"] in (TRACEBACK, HANG, SILENT) or bool(trial["different"])


def _write(record: Record, done: list[dict[str, Any]]) -> None:
    rows, today = [], record.stamp["code"]
    for fault in FAULTS:
        found = [trial for trial in done if trial["fault"] == fault and trial["hits"]]
        verdicts = [trial["verdict"] for trial in found]
        rows.append({
            "fault": fault, "trials": len(found), "refused": verdicts.count(REFUSED),
            "harmless": verdicts.count(HARMLESS), "tracebacks": verdicts.count(TRACEBACK),
            "hangs": verdicts.count(HANG), "compared": len(found),
            "different": sum(bool(trial["different"]) or trial["verdict"] == SILENT for trial in found),
            "code": min(found, key=lambda trial: trial["code"] == today)["code"] if found else today,
        })  # fmt: skip
    record.set_table("faults", COLUMNS, rows)
    record.set_values(
        commands=len({trial["case"] for trial in done}),
        **{
            name: sum(row[name] for row in rows)
            for name in ("trials", "refused", "harmless", "tracebacks", "hangs", "different")
        },
    )


def _line(trial: dict[str, Any]) -> str:
    found = f"{trial['case']}, {trial['fault']} after {trial['after']} of {trial['calls']} calls: {trial['verdict']}"
    if trial["different"]:
        found += f"; DIFFERENT: {trial['different'][:5]}"
    return found + (f": {trial['said'][:160]}" if _is_wrong(trial) else "")


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="trials of each command under each fault")
    parser.add_argument("--folder", type=Path, default=Path("runs/storage_faults"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    add_json_argument(parser, "storage_faults")
    return parser


if __name__ == "__main__":
    sys.exit(main())
