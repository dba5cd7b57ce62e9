"""Speed of BERT-LARGE's training step: batches that fit, attention kernels, and what the backward pass recomputes."""

from typing import Any

from on_gpu.agreement import NO_ATTENTION_DROPOUT
from on_gpu.cases import Cases, UnsupportedError
from on_gpu.scale import Scale
from on_gpu.steps import Setting, Step, largest, rates, seconds_per_step

from bert_jax.model.bert import REMAT_POLICIES

COLUMNS = {
    "rows": "{rows}",
    "ms per step": "{step_ms:.1f}",
    "sequences per second": "{sequences_per_second:,.0f}",
    "model TFLOP/s": "{tflops:.0f}",
    "MFU": "{mfu:.1%}",
    "GiB": "{peak_gib:.1f}",
    "compiled in": "{compile_seconds:.0f} s",
}
STEP_COLUMNS = {"sequences": "{case}", "outcome": "{outcome}", **COLUMNS}
ATTENTION_COLUMNS = {"attention": "{case}", "outcome": "{outcome}", **COLUMNS}
REMAT_COLUMNS = {"recomputed": "{case}", "outcome": "{outcome}", **COLUMNS}
KERNELS = (("xla", "attention"), ("xla", "none"), ("cudnn", "none"))
"""Attention and remat, the more telling ones first."""
RECIPE = {128: (), 512: (("remat", "attention"),)}
"""Overrides of a phase, by its sequence length; as in configs/bert_large.py."""


def measured(step: Step, scale: Scale) -> dict[str, Any]:
    """Returns the row of a compiled step."""
    return rates(step, seconds_per_step(step, scale.rounds, scale.round_seconds))


def step_times(cases: Cases, scale: Scale) -> None:
    """Measures the recipe at 128 and 512 tokens, unpacked and packed, with the largest batch that fits."""
    for packed in (False, True):
        for seq_len, candidates in scale.batches.items():
            settings = [Setting(scale.large, rows, seq_len, packed, overrides=RECIPE[seq_len]) for rows in candidates]
            name = f"{seq_len} tokens" + (", packed" if packed else "")
            cases.measure(name, lambda settings=settings: largest(settings, lambda step: measured(step, scale)))


def attention(cases: Cases, scale: Scale) -> None:
    """Measures each kernel with and without dropout of the attention's weights, on the same batch.

    Plain attention is measured with its L x L arrays kept, and with them recomputed.
    """
    for seq_len in scale.lengths:
        for kernel, remat in KERNELS:
            for dropout in ((), NO_ATTENTION_DROPOUT):
                overrides = (("attention", kernel), ("remat", remat), *dropout)
                setting = Setting(scale.large, scale.rows[seq_len], seq_len, overrides=overrides)
                recomputed = "" if remat == "none" else f", remat={remat}"
                name = f"{kernel}{recomputed}, {seq_len} tokens, {'no ' if dropout else ''}attention dropout"
                cases.measure(name, lambda setting=setting: _one(setting, scale))


def remat(cases: Cases, scale: Scale) -> None:
    """Measures each policy on the same batch."""
    for seq_len in scale.lengths:
        for policy in REMAT_POLICIES:
            setting = Setting(scale.large, scale.rows[seq_len], seq_len, overrides=(("remat", policy),))
            cases.measure(f"{policy}, {seq_len} tokens", lambda setting=setting: _one(setting, scale))


def _one(setting: Setting, scale: Scale) -> dict[str, Any]:
    try:
        step = Step(setting)
    except (NotImplementedError, ValueError) as error:
        if "not support" in str(error):
            raise UnsupportedError(str(error)) from error
        raise
    return measured(step, scale)
