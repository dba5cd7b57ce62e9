"""Parses the collectives and loops of a compiled step from the text of its program (HLO).

A program is a set of computations; a loop's body runs once per iteration. XLA writes the groups of devices of a
collective in three notations, from each of which follow the axes of the mesh that it runs along.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.parallel.mesh import between_slices

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (\([^=]*\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)|(?:branch|called)_computations="
    r"\{([^}]*)\}"
)
_WHILE = re.compile(r" while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_SENT = re.compile(r" = \((.*?), u32\[\].* send\(.*_xla_megascale_transfer_type=\"(\w+)\"")
_IOTA = r"\(?\[([\d,]+)\](?:T\(([\d,]+)\))?"
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind along the same axes of the mesh, in the same loops and type.

    Attributes:
      kind: one of `KINDS`.
      axes: the mesh axes that the collectives run along; None if the groups do not match any axes.
      dtype: in XLA's notation: f32, bf16.
      loops: depth of loop nesting.
      instructions: number of instructions in the program.
      count: number of executions per step, of all instructions.
      asynchronous: the part of `count` that runs beside other work: in pieces, or from a start to a later end.
      bytes: per step, of the complete arrays that a device takes part in reducing, gathering or moving.
      devices: number of devices in a group.
      between_slices: True if the arrays cross the network between slices; `bytes` are then those of a device's shard,
        and `devices` are slices.
    """

    kind: str
    axes: tuple[str, ...] | None
    dtype: str
    loops: int
    instructions: int
    count: int
    bytes: int
    devices: int
    between_slices: bool = False
    asynchronous: int = 0

    @property
    def bytes_sent(self) -> float:
        """Bytes that a device sends per step in a ring of devices, as on a TPU's torus."""
        share = (self.devices - 1) / self.devices
        return self.bytes * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)


def read_collectives(program: str, mesh: Mapping[str, int], slices: int = 1) -> list[Collective]:
    """Returns the collectives of a compiled, partitioned program, the largest first.

    `mesh` has the sizes of the mesh's axes, in order, mapped to `slices` as in `make_mesh`. A collective that is split
    into a chain of pieces, which overlap with other work, is counted once.
    """
    lines, entry = _computations(program)
    between = dict(zip(mesh, between_slices(mesh, slices), strict=True))
    within = {axis: size // between[axis] for axis, size in mesh.items()}
    sums: dict[tuple[Any, ...], list[int]] = {}
    chains: set[str] = set()
    for name, (runs, loops) in _runs(lines, entry).items():
        for line in lines[name]:
            if match := _INSTRUCTION.match(line):
                if chain := re.search(r"channel_id=\d+.*chain_id=\"\d+\"", line):
                    if chain[0] in chains:
                        continue
                    chains.add(chain[0])
                is_asynchronous = bool(chain or match[3])
                kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else match[2]
                members = _groups(line)
                # The program is one slice's: what stays in it may count its devices from 0.
                cut = within if members and max(map(max, members)) < math.prod(within.values()) else mesh
                everyone = [list(range(math.prod(cut.values())))]
                axes = None if members is None else _axes(members or everyone, cut)
                devices = len((members or everyone)[0])
                dtype, count = _size(match[1], match[2], started=bool(match[3]), devices=devices)
                key = (kind, axes, dtype, loops, devices, False)
            elif match := _SENT.search(line):
                kind = match[2].lower().replace("_", "-")
                dtype, count = _size(match[1], kind, started=True, devices=1)
                is_asynchronous = True
                axes = tuple(axis for axis, size in between.items() if size > 1)
                key = (kind, axes, dtype, loops, slices, True)
            else:
                continue
            total = sums.setdefault(key, [0, 0, 0, 0])
            for i, amount in enumerate((1, runs, runs * count, runs * is_asynchronous)):
                total[i] += amount
    found = [
        Collective(kind, axes, dtype, loops, instructions, count, total, devices, crosses, asynchronous)
        for (kind, axes, dtype, loops, devices, crosses), (instructions, count, total, asynchronous) in sums.items()
    ]
    return sorted(found, key=lambda one: -one.bytes)


def read_loops(program: str) -> list[dict[str, int]]:
    """Returns the loops of a compiled program: nesting `depth` and number of iterations (`trips`) of each.

    Twice as many loops as in the source indicate a program that does its work twice.
    """
    lines, entry = _computations(program)
    found = []
    for name, (_, depth) in _runs(lines, entry).items():
        for line in lines[name]:
            if loop := _WHILE.search(line):
                found.append({"depth": depth, "trips": _trips(line, lines[loop[1]])})
    return sorted(found, key=lambda loop: (loop["depth"], loop["trips"]))


def _computations(program: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of each computation, and the name of the entry computation."""
    lines: dict[str, list[str]] = {}
    entry, current = "", None
    for line in program.split("\n"):
        if current is None and (match := _COMPUTATION.match(line)):
            current = lines.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(re.sub(r"/\*index=\d+\*/", "", line))
    if not entry:
        raise ValueError("ENTRY not found; expected the text of a compiled program")
    return lines, entry


def _runs(lines: Mapping[str, list[str]], entry: str) -> dict[str, tuple[int, int]]:
    """Returns for each computation the number of runs per step, and its loop depth."""
    runs: dict[str, tuple[int, int]] = {}

    def visit(name: str, times: int, loops: int) -> None:
        before, _ = runs.get(name, (0, 0))
        runs[name] = before + times, loops
        for line in lines[name]:
            loop = _WHILE.search(line)
            for called in _called(line):
                if called not in lines:
                    continue
                if loop and called == loop[2]:
                    visit(called, times * _trips(line, lines[loop[1]]), loops + 1)
                elif _INSTRUCTION.match(line) is None:  # a collective calls an addition
                    visit(called, times, loops)

    visit(entry, 1, 0)
    return runs


def _called(line: str) -> Iterator[str]:
    for one, several in _CALLED.findall(line):
        yield from (name.strip().lstrip("%") for name in ([one] if one else several.split(",")))


def _trips(loop: str, condition: list[str]) -> int:
    """Returns the iterations of a loop: XLA's trip count, or else the constant that its counter is compared with.

    The counter starts at 0. Returns 1 if neither is known.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop):
        return int(known[1])
    constants = [int(match[1]) for line in condition if (match := re.search(r"= s32\[\]\S* constant\((\d+)\)", line))]
    return constants[0] if len(constants) == 1 else 1


def _size(result: str, kind: str, *, started: bool, devices: int) -> tuple[str, int]:
    """Returns dtype and bytes of a collective's complete arrays, from the type of its result."""
    arrays = []
    for dtype, shape in _ARRAY.findall(result):
        bits = re.search(r"\d+", dtype)
        elements = math.prod(int(size) for size in shape.split(",") if size)
        arrays.append((dtype, elements * (int(bits[0]) if bits else 8) // 8))
    if started and kind != "all-reduce":  # (operands, results, state): what is started has both
        arrays = [array for array in arrays if array[0] != "u32"]
        arrays = arrays[len(arrays) // 2 :]
    total = sum(count for _, count in arrays)
    return max(arrays, key=lambda array: array[1])[0], total * (devices if kind == "reduce-scatter" else 1)


# --- Groups of devices -------------------------------------------------------------------------------------------

Groups = list[list[int]]


def _groups(line: str) -> Groups | None:
    """Returns a collective's groups of devices, as indices in the mesh: [] if all are in one, None if unknown."""
    if pairs := re.search(r"source_target_pairs=\{(\{[^=]*\})\}", line):
        return _joined([[int(place) for place in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs[1])])
    if listed := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", line):
        return [[int(place) for place in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    if iota := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", line):
        return _iota(iota[2], iota[3]).reshape(-1, _numbers(iota[1])[-1]).tolist()
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](.*?)\{([^}]*)\}", line):
        if ":" in named[3]:  # a part of an axis
            return None
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        order = re.search(_IOTA, named[2])
        places = _iota(order[1], order[2]) if order else None
        return _groups_along(axes, tuple(re.findall(r"'(\w+)'", named[3])), places)
    return []


def _joined(pairs: Groups) -> Groups:
    """Returns the groups of devices connected by pairs of source and target."""
    groups: list[set[int]] = []
    for pair in pairs:
        touching = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in touching] + [set(pair).union(*touching)]
    return [sorted(group) for group in groups]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Returns device indices over axes of these sizes, transposed to `order`."""
    places = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return places.transpose(_numbers(order)) if order else places


def _groups_along(mesh: Mapping[str, int], axes: tuple[str, ...], places: np.ndarray | None = None) -> Groups:
    """Returns the groups of devices that differ only along `axes`."""
    places = np.arange(math.prod(mesh.values())) if places is None else places
    along = [i for i, axis in enumerate(mesh) if axis in axes]
    grid = np.moveaxis(places.reshape(tuple(mesh.values())), along, range(-len(along), 0))
    return grid.reshape(-1, math.prod(mesh[axis] for axis in axes)).tolist()


def _axes(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the axes (with more than one device) that the groups run along; None if there are none."""

    def canonical(groups: Groups) -> list[list[int]]:
        return sorted(map(sorted, groups))

    able = [axis for axis, size in mesh.items() if size > 1]
    chosen = itertools.chain.from_iterable(itertools.combinations(able, n) for n in range(1, len(able) + 1))
    wanted = canonical(groups)
    return next((axes for axes in chosen if canonical(_groups_along(mesh, axes)) == wanted), None)
