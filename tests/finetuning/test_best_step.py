"""The best step of a run and early stopping, from the scores of evaluations."""

import json
import math

import pytest

from bert_jax.finetuning.results import BestStep


def scored(*scores: float, **settings: float) -> BestStep:
    """Returns the result of evaluations after steps 10, 20, ..."""
    best = BestStep(**{"keep_best": True, **settings})
    for number, score in enumerate(scores, start=1):
        best.add(10 * number, score)
    return best


def test_best_step_is_the_earliest_of_equal_scores():
    best = scored(0.1, 0.7, 0.7, 0.3)
    assert (best.best, best.score) == (20, 0.7)


def test_run_without_keep_best_has_no_best_step():
    best = scored(0.1, 0.7, keep_best=False, patience=1)
    assert (best.best, best.to_dict(), best.ends_training()) == (None, None, False)


@pytest.mark.parametrize(
    ("scores", "min_delta", "count"),
    [
        ((), 0.0, 0),
        ((-0.5,), 0.0, 0),
        ((0.5, 0.5, 0.4), 0.0, 2),
        ((0.5, 0.4, 0.6), 0.0, 0),
        ((0.5, 0.55, 0.6), 0.1, 2),  # 0.6 is not above 0.5 by more than 0.1
        ((0.5, 0.55, 0.65, 0.7), 0.1, 1),  # small gains add up
        ((0.5, 0.4, math.nan), 0.0, 2),
    ],
)
def test_evaluations_without_improvement_are_counted(scores: tuple, min_delta: float, count: int):
    assert scored(*scores, min_delta=min_delta).without_improvement() == count
    assert scored(*scores, min_delta=min_delta, patience=max(count, 1)).ends_training() == (count > 0)
    assert not scored(*scores, min_delta=min_delta, patience=count + 1).ends_training()
    assert not scored(*scores, min_delta=min_delta, patience=0).ends_training()


def test_gain_within_min_delta_is_the_best_all_the_same():
    assert scored(0.5, 0.55, min_delta=0.1).best == 20


def test_scores_that_are_not_finite_are_never_the_best():
    assert scored(math.nan, 0.1, math.inf).best == 20
    assert (scored(math.nan).best, scored(math.nan).score) == (None, None)


def test_restored_scores_continue_as_if_never_stopped():
    whole, restored = scored(0.5, math.nan, 0.4, patience=2), scored(0.9, patience=2)
    restored.restore(json.loads(json.dumps(scored(0.5, math.nan, patience=2).to_dict())))
    restored.add(30, 0.4)
    assert restored.to_dict() == whole.to_dict()
    assert (restored.best, restored.ends_training()) == (10, True)
    restored.restore(None)
    assert restored.best is None
