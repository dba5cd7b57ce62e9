"""Parses the collectives and estimated times of a compiled step from the text of its program (HLO).

A program is a set of computations; a loop's body runs once per iteration. XLA writes the groups of devices of a
collective in three notations.
"""

import collections
import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}(?!\})", re.MULTILINE | re.DOTALL)
"""A line in it that begins with two braces ends the metadata of a Pallas kernel."""
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (\([^=]*\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(r"(?:calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_WHILE = re.compile(r" while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_SENT = re.compile(r" = \((.*?), u32\[\].* send\(.*_xla_megascale_transfer_type=\"(\w+)\"")
_CONTROL = re.compile(r"while|body|cond|scan|branch_\d+_fun|\w+_call|checkpoint|rematted_computation|shard_map")
"""Names in the path of an operation that are no module's."""
_NO_ESTIMATE = 2**63 - 1
"""Cycles that XLA writes for a fusion on a sparse core, whose time it does not estimate."""
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind between as many devices, in the same loops and type, all asynchronous or none.

    Attributes:
      kind: one of `KINDS`.
      dtype: in XLA's notation: f32, bf16.
      loops: depth of loop nesting.
      devices: number of devices in a group.
      between_slices: True if the arrays cross the network between slices; `bytes` are then those of a device's shard,
        and `devices` are slices.
      asynchronous: True if they run beside other work: in pieces, or from a start to a later end.
      instructions: number of instructions in the program.
      count: number of executions per step, of all instructions.
      bytes: per step, of the complete arrays that a device takes part in reducing, gathering or moving.
    """

    kind: str
    dtype: str
    loops: int
    devices: int
    between_slices: bool
    asynchronous: bool
    instructions: int
    count: int
    bytes: int


def read_collectives(program: str, devices: int, slices: int = 1) -> list[Collective]:
    """Returns the collectives of a program that is partitioned over so many devices, the largest first.

    A collective that is split into a chain of pieces, which overlap with other work, is counted once.
    """
    sums: collections.defaultdict[tuple[Any, ...], np.ndarray] = collections.defaultdict(lambda: np.zeros(3, int))
    chains: set[str] = set()
    for line in _lines(program):
        if match := _INSTRUCTION.match(line.text):
            if chain := re.search(r"channel_id=\d+.*chain_id=\"\d+\"", line.text):
                if chain[0] in chains:
                    continue
                chains.add(chain[0])
            is_asynchronous = bool(chain or match[3])
            kind = "reduce-scatter" if line.computation.startswith("all-reduce-scatter") else match[2]
            members = _members(line.text, devices)
            dtype, size = _size(match[1], match[2], started=bool(match[3]), devices=members)
        elif match := _SENT.search(line.text):
            kind, members, is_asynchronous = match[2].lower().replace("_", "-"), slices, True
            dtype, size = _size(match[1], kind, started=True, devices=1)
        else:
            continue
        key = (kind, dtype, line.loops, members, match.re is _SENT, is_asynchronous)
        sums[key] += (1, line.runs, line.runs * size)
    return sorted((Collective(*key, *numbers.tolist()) for key, numbers in sums.items()), key=lambda one: -one.bytes)


@dataclass(frozen=True)
class Part:
    """Instructions of one operation in one module, with the cycles that XLA:TPU estimates for them.

    Attributes:
      module: named scopes around the operation, as "encoder/attention"; empty without any.
      operation: JAX's primitive, after the equation of an einsum; XLA's instruction where it has no name.
      direction: "forward", "backward", "recomputed" in the backward pass, or empty outside of the differentiated part.
      cycles: per step, on one device.
      count: number of executions per step.
    """

    module: str
    operation: str
    direction: str
    cycles: int
    count: int


def read_parts(program: str) -> list[Part]:
    """Returns the parts of a program whose cycles XLA estimates, the longest first; [] if it estimates none.

    It estimates fusions, copies and the like, not collectives, custom kernels nor what runs on sparse cores.
    Instructions in loops count for each iteration.
    """
    sums: collections.defaultdict[tuple[str, str, str], np.ndarray] = collections.defaultdict(lambda: np.zeros(2, int))
    for line in _lines(program):
        cycles = re.search(r'"estimated_cycles":"(\d+)"', line.text)
        if cycles and int(cycles[1]) != _NO_ESTIMATE:
            sums[_place(line.text)] += (int(cycles[1]) * line.runs, line.runs)
    return sorted((Part(*place, *numbers.tolist()) for place, numbers in sums.items()), key=lambda part: -part.cycles)


def _place(text: str) -> tuple[str, str, str]:
    """Returns module, operation and direction of an instruction, from the path in its metadata.

    JAX writes "jit(train_step)/transpose(jvp(encoder))/while/body/closed_call/attention/td,df->tf/dot_general".
    """
    path = re.search(r'op_name="([^"]*)"', text)
    if path is None:
        instruction = re.search(r" ([\w\-]+)\(", text)
        return "", instruction[1] if instruction else "", ""
    *scopes, operation = re.sub(r"\bjit\([^/]*\)(?=/|$)|\b(?:jvp|transpose|vmap)\(|\)", "", path[1]).split("/")
    modules = dict.fromkeys(scope for scope in scopes if re.fullmatch(r"\w+", scope) and not _CONTROL.fullmatch(scope))
    equations = [scope for scope in scopes if "->" in scope]
    directions = {"rematted_computation": "recomputed", "transpose(": "backward", "jvp(": "forward", "": ""}
    direction = next(directions[mark] for mark in directions if mark in path[1])
    return "/".join(modules), " ".join([*equations[-1:], operation.split(".")[0]]), direction


class _Line(NamedTuple):
    """An instruction: its computation, text, executions per step, and loop depth."""

    computation: str
    text: str
    runs: int
    loops: int


def _lines(program: str) -> list[_Line]:
    """Returns the instructions of all computations that run. ValueError for the text of no compiled program."""
    found = _COMPUTATION.findall(re.sub(r"/\*index=\d+\*/", "", program))
    computations = {name: body.splitlines() for _, name, body in found}
    entry = next((name for is_entry, name, _ in found if is_entry), None)
    if entry is None:
        raise ValueError("ENTRY not found; expected the text of a compiled program")
    runs: dict[str, tuple[int, int]] = {}

    def visit(name: str, times: int, loops: int) -> None:
        before, _ = runs.get(name, (0, 0))
        runs[name] = before + times, loops
        for text in computations[name]:
            if loop := _WHILE.search(text):
                known = re.search(r'"known_trip_count":\{"n":"(\d+)"', text)
                trips = int(known[1]) if known else _trips(computations[loop[1]])
                visit(loop[1], times * trips, loops)
                visit(loop[2], times * trips, loops + 1)
            elif _INSTRUCTION.match(text) is None:  # a collective calls an addition
                called = re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(text)))
                for other in filter(computations.__contains__, called):
                    visit(other, times, loops)

    visit(entry, 1, 0)
    return [_Line(name, text, *counts) for name, counts in runs.items() for text in computations[name]]


def _trips(condition: list[str]) -> int:
    """Returns the iterations of a `lax.scan`, which counts from 0 up to a constant in its condition; else 1."""
    counted = r"(%[\w.\-]+) = s32\[\]\S* constant\((\d+)\).*ROOT .* compare\([^\n]*, \1\), direction=LT"
    found = re.search(counted, "\n".join(condition), re.DOTALL)
    return int(found[2]) if found else 1


def _size(result: str, kind: str, *, started: bool, devices: int) -> tuple[str, int]:
    """Returns dtype and bytes of a collective's complete arrays, from the type of its result."""
    arrays = []
    for dtype, shape in _ARRAY.findall(result):
        bits = int((re.findall(r"\d+", dtype) or [8])[0])
        arrays.append((dtype, math.prod(int(size) for size in shape.split(",") if size) * bits // 8))
    if started and kind != "all-reduce":  # (operands, results, state): what is started has both
        arrays = [array for array in arrays if array[0] != "u32"]
        arrays = arrays[len(arrays) // 2 :]
    total = sum(count for _, count in arrays)
    return max(arrays, key=lambda array: array[1])[0], total * (devices if kind == "reduce-scatter" else 1)


def _members(line: str, devices: int) -> int:
    """Returns the number of devices in each group of a collective; a permutation has pairs of source and target."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=", line):
        return int(iota[1].split(",")[-1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])  # an axis, or a part of it
        return math.prod(int(part) if part else sizes[name] for name, part in parts)
    return devices
