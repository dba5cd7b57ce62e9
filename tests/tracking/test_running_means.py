"""Means of metrics and spikes of the loss."""

import json
import math
import random

import pytest

from bert_jax.tracking.running_means import LossSpikes


def noisy_losses(steps: int, spike_at: tuple[int, ...] = ()) -> list[float]:
    """Returns losses that fall from 10 with noise of 0.05, and are 3 higher at some steps."""
    rng = random.Random(0)
    return [
        5 + 5 * math.exp(-step / 3000) + rng.gauss(0, 0.05) + 3 * (step in spike_at) for step in range(steps)
    ]  # fmt: skip


def found_at(spikes: LossSpikes, losses: list[float]) -> list[int]:
    return [step for step, loss in enumerate(losses) if spikes.add({"loss": loss, "nonfinite_streak": 0})]


def test_a_loss_far_above_the_last_ones_is_a_spike():
    spikes = LossSpikes(10.0)
    assert found_at(spikes, noisy_losses(2000, (500, 1200, 1900))) == [500, 1200, 1900]
    assert spikes.take() == {"loss_spikes": 3}
    assert spikes.take() == {"loss_spikes": 0}


def test_spikes_in_a_row_are_all_counted_and_described_once():
    spikes = LossSpikes(10.0)
    assert found_at(spikes, noisy_losses(600, (500, 501, 502, 510))) == [500, 510]
    assert spikes.take() == {"loss_spikes": 4}


@pytest.mark.parametrize("losses", [[4.0] * 300, noisy_losses(40)[:31] + [99.0], noisy_losses(3000)])
def test_equal_losses_first_steps_and_noise_are_no_spikes(losses: list[float]):
    assert found_at(LossSpikes(10.0), losses) == []


def test_a_loss_that_stays_high_is_the_new_level():
    spikes = LossSpikes(10.0)
    found_at(spikes, [5 + step % 7 / 100 for step in range(200)])
    found_at(spikes, [9 + step % 7 / 100 for step in range(200)])
    assert 60 <= spikes.take()["loss_spikes"] <= 70
    assert found_at(spikes, [9.0, 13.0]) == [1]


def test_skipped_steps_are_not_compared():
    spikes = LossSpikes(10.0)
    found_at(spikes, noisy_losses(100))
    assert spikes.add({"loss": math.nan, "nonfinite_streak": 1}) == ""
    assert spikes.add({"loss": 1e9, "nonfinite_streak": 2}) == ""
    assert spikes.take() == {"loss_spikes": 0}


def test_a_resumed_run_finds_the_spikes_of_an_uninterrupted_run():
    losses = noisy_losses(600, (250, 301, 480))
    found = found_at(LossSpikes(10.0), losses)
    assert found == [250, 301, 480]
    for cut in (10, 251, 400):
        first = LossSpikes(10.0)
        before = found_at(first, losses[:cut])
        second = LossSpikes(10.0, json.loads(json.dumps(first.to_dict())))
        assert before + [cut + step for step in found_at(second, losses[cut:])] == found
        assert second.take() == {"loss_spikes": 3}


def test_none_are_sought_with_zero_deviations():
    spikes = LossSpikes(0.0)
    assert found_at(spikes, noisy_losses(600, (500,))) == []
    assert (spikes.take(), spikes.to_dict()) == ({}, {})
