"""Retention of checkpoints: the newest `checkpoint.keep`, the best step, and milestones, which are never deleted.

    WORKDIR/milestones.json   {"format_version": 1, "steps": [0, 1000, ...], "checksum": ...}

The file lists every step that was saved as a milestone: a resumed run may have others in its config, and keeps these.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from bert_jax.config import ConfigDict
from bert_jax.errors import InputError
from bert_jax.files import atomic, json_checksums, remote
from bert_jax.files.format_versions import check_version

MILESTONES_FILE = "milestones.json"
_FORMAT_VERSION = 1
_KEY, _EVERY_KEY = "checkpoint.milestones", "checkpoint.milestone_every_steps"


@dataclass(frozen=True)
class Milestones:
    """The milestones of a config: some `steps`, and the multiples of `every`, 0 among them; every=0 has none."""

    steps: frozenset[int] = frozenset()
    every: int = 0

    @classmethod
    def from_config(cls, config: ConfigDict) -> "Milestones":
        """Returns the milestones of a pre-training config. InputError, with the key, for an invalid step."""
        given, every, total = config.checkpoint.milestones, config.checkpoint.milestone_every_steps, config.total_steps
        steps = tuple(given)
        if wrong := [step for step in steps if type(step) is not int or step < 0]:
            raise InputError(f"{_KEY}={given!r:.80}: expected steps such as 0,1000,10000; got {wrong[0]!r}")
        if duplicate := sorted(step for step in {*steps} if steps.count(step) > 1):
            raise InputError(f"{_KEY}={given!r:.80}: duplicate step {duplicate[0]}; list each step once")
        if steps and max(steps) > total:
            raise InputError(
                f"{_KEY}={given!r:.80}: step {max(steps)} is past total_steps={total}; list steps of 0 to {total}"
            )
        if every < 0:
            raise InputError(f"{_EVERY_KEY}={every}: must be a number of steps, or 0 for none")
        return cls(frozenset(steps), every)

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and (step in self.steps or (self.every > 0 and step % self.every == 0))

    def up_to(self, last: int) -> set[int]:
        """Returns the milestones of 0 to `last`; none if it is negative."""
        listed = {step for step in self.steps if step <= last}
        return listed | {*(range(0, last + 1, self.every) if self.every else ())}


NO_MILESTONES = Milestones()


class MilestoneRecord:
    """The steps in `milestones.json` of a workdir. All processes read it; process 0 alone adds steps."""

    def __init__(self, workdir: epath.Path):
        """Reads the file, if there is one. InputError if it is damaged, or of a newer version."""
        self._path = workdir / MILESTONES_FILE
        self.steps: set[int] = set()
        if remote.exists(self._path):
            try:
                content = dict(json.loads(atomic.read_whole(self._path)))
                check_version(self._path, content, _FORMAT_VERSION)
                if not json_checksums.is_intact(content):
                    raise ValueError("checksum mismatch")
                self.steps = {int(step) for step in content["steps"]}
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise InputError(
                    f"{self._path}: damaged ({type(error).__name__}: {error}); write the steps to keep into it, such "
                    f'as {{"format_version": {_FORMAT_VERSION}, "steps": [0, 1000]}}, or delete it to keep those of '
                    f"{_KEY} alone"
                ) from error

    def add(self, steps: Iterable[int], *, write: bool) -> None:
        """Adds steps, and writes the file atomically if `write` and if any is new."""
        if new := {*steps} - self.steps:
            self.steps |= new
            if write:
                content = json_checksums.with_checksum({"format_version": _FORMAT_VERSION, "steps": sorted(self.steps)})
                atomic.write_whole(self._path, (json.dumps(content) + "\n").encode())


@dataclass(frozen=True)
class Retention:
    """Policy of Orbax: preserves the `keep` newest steps and all milestones, those of the record included.

    It also preserves the best step of each of the newest: if the newest is damaged, a run resumes from another.
    `best_up_to` maps a step to the best one up to it, None for none.
    """

    keep: int
    milestones: Milestones
    recorded: Collection[int]
    best_up_to: Callable[[int], int | None] = lambda step: None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns whether each checkpoint, the oldest first, is preserved; takes no look at the disk."""
        newest = len(checkpoints) - self.keep
        best = {self.best_up_to(found.step) for found in checkpoints[max(newest, 0) :]}
        return [
            place >= newest or found.step in self.milestones or found.step in self.recorded or found.step in best
            for place, found in enumerate(checkpoints)
        ]


@dataclass(frozen=True)
class SavePlan:
    """Checkpoints of a run: those that are still to be saved, and those that its end leaves on the disk.

    Attributes:
      saves: number of saves that are left.
      milestones: number of milestones of the whole run.
      kept: number of checkpoints that are kept, milestones included.
    """

    saves: int
    milestones: int
    kept: int


def plan_saves(config: ConfigDict, phase_ends: Iterable[int], start: int | None) -> SavePlan:
    """Plans the saves of a run that resumes from the checkpoint of step `start`; None for a new run."""
    milestones, every = Milestones.from_config(config).up_to(config.total_steps), config.checkpoint.every_steps
    regular = {*range(every, config.total_steps + 1, every), *phase_ends}
    due = {step for step in regular | milestones if start is None or step > start}
    on_disk = due if start is None else due | {start}
    kept = milestones.union(sorted(on_disk)[-config.checkpoint.keep :])
    return SavePlan(len(due), len(milestones), len(kept))
