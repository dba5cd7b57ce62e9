"""Retention of checkpoints: the newest `checkpoint.keep`, the best step, and milestones, which are never deleted."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from orbax.checkpoint import checkpoint_managers as managers

from bert_jax.config_keys import PretrainConfig
from bert_jax.errors import InputError

_KEY = "checkpoint.milestones"


@dataclass(frozen=True)
class Milestones:
    """The milestones of a config: some `steps`, and the multiples of `every`, 0 among them; every=0 has none."""

    steps: frozenset[int] = frozenset()
    every: int = 0

    @classmethod
    def from_config(cls, config: PretrainConfig) -> "Milestones":
        """Returns the milestones of a pre-training config. InputError, with the key, for an invalid step."""
        steps, every, total = config.checkpoint.milestones, config.checkpoint.milestone_every_steps, config.total_steps
        if wrong := [step for step in steps if step < 0]:
            raise InputError(f"{_KEY}={steps!r:.80}: expected steps such as 0,1000,10000; got {wrong[0]!r}")
        if duplicate := sorted(step for step in {*steps} if steps.count(step) > 1):
            raise InputError(f"{_KEY}={steps!r:.80}: duplicate step {duplicate[0]}; list each step once")
        if steps and max(steps) > total:
            raise InputError(
                f"{_KEY}={steps!r:.80}: step {max(steps)} is past total_steps={total}; list steps of 0 to {total}"
            )
        return cls(frozenset(steps), every)

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and (step in self.steps or (self.every > 0 and step % self.every == 0))

    def up_to(self, last: int) -> set[int]:
        """Returns the milestones of 0 to `last`; none if it is negative."""
        listed = {step for step in self.steps if step <= last}
        return listed | {*(range(0, last + 1, self.every) if self.every else ())}


NO_MILESTONES = Milestones()


@dataclass(frozen=True)
class BestOfNewest:
    """Policy of Orbax: preserves the best step of each of the `keep` newest ones.

    If the newest is damaged, a run resumes from another. `best_up_to` maps a step to the best one up to it, or None.
    """

    keep: int
    best_up_to: Callable[[int], int | None]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns whether each checkpoint, the oldest first, is preserved."""
        best = {self.best_up_to(found.step) for found in checkpoints[-self.keep :]}
        return [found.step in best for found in checkpoints]


def retention(
    keep: int, milestones: Milestones, earlier: Collection[int], best_up_to: Callable[[int], int | None]
) -> Any:
    """Returns Orbax's policy of a run: the `keep` newest steps, the best ones of them, and all milestones."""
    return managers.AnyPreservationPolicy(
        [
            managers.LatestN(keep),
            managers.CustomSteps([*milestones.steps, *earlier]),
            *([managers.EveryNSteps(milestones.every)] if milestones.every else []),
            BestOfNewest(keep, best_up_to),
        ]
    )


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


def plan_saves(config: PretrainConfig, phase_ends: Iterable[int], start: int | None) -> SavePlan:
    """Plans the saves of a run that resumes from the checkpoint of step `start`; None for a new run."""
    milestones, every = Milestones.from_config(config).up_to(config.total_steps), config.checkpoint.every_steps
    regular = {*range(every, config.total_steps + 1, every), *phase_ends}
    due = {step for step in regular | milestones if start is None or step > start}
    on_disk = due if start is None else due | {start}
    kept = milestones.union(sorted(on_disk)[-config.checkpoint.keep :])
    return SavePlan(len(due), len(milestones), len(kept))
