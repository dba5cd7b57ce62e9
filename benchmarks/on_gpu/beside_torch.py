"""Speed of the training step beside `transformers` BertForPreTraining in torch, a round of each in turn.

Both sides train BERT-LARGE on the same rows, in bf16 with fp32 parameters, with all dropout of 0.1, AdamW and clipped
gradients. The torch side has SDPA attention, `torch.compile` and the fused AdamW, and computes the logits of all
tokens, as `transformers` does. A rehearsal on the CPU does not compile.
"""

import statistics
from collections.abc import Callable
from typing import Any

from on_gpu.cases import Cases
from on_gpu.scale import FULL, REHEARSAL, Scale
from on_gpu.speed import RECIPE
from on_gpu.steps import Rounds, Setting, Step
from processes import Side, UnsupportedError, take_turns
from record import spread, with_range

COLUMNS = {
    "sequences": "{case}",
    "outcome": "{outcome}",
    "rows": "{rows}",
    "bert_jax, sequences per second": "{jax_sequences_per_second:,.0f}",
    "torch, sequences per second": "{torch_sequences_per_second:,.0f}",
    "bert_jax / torch": with_range("ratio", ".2f"),
}


def beside_torch(cases: Cases, scale: Scale) -> None:
    """Measures the ratio of both sides at 128 and at 512 tokens: the median of the rounds' ratios."""

    def compare(seq_len: int) -> dict[str, Any]:
        arguments, rows = (scale is REHEARSAL, seq_len), scale.rows[seq_len]
        share = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        sides = {
            "torch": Side(torch_side, *arguments, JAX_PLATFORMS="cpu", **share),
            "jax": Side(jax_side, *arguments, **share),
        }
        seconds = take_turns(sides, scale.rounds)
        if "torch" not in seconds:
            raise UnsupportedError("torch sees no GPU")
        rates = {f"{name}_sequences_per_second": rows / statistics.median(seconds[name]) for name in sides}
        ratios = [theirs / ours for theirs, ours in zip(seconds["torch"], seconds["jax"], strict=True)]
        return {"rows": rows, **rates, **spread("ratio", ratios)}

    for seq_len in reversed(scale.lengths):
        cases.measure(f"{seq_len} tokens", lambda seq_len=seq_len: compare(seq_len))


def jax_side(rehearse: bool, seq_len: int) -> Callable[[], float]:
    scale = REHEARSAL if rehearse else FULL
    setting = Setting(scale.large, scale.rows[seq_len], seq_len, overrides=RECIPE[seq_len])
    return Rounds(Step(setting), scale.round_seconds)


def torch_side(rehearse: bool, seq_len: int) -> Callable[[], float]:
    import torch
    from torch_side import torch_rounds

    if not (rehearse or torch.cuda.is_available()):
        raise UnsupportedError("torch sees no GPU")
    scale = REHEARSAL if rehearse else FULL
    return torch_rounds(
        Setting(scale.large, scale.rows[seq_len], seq_len), scale.round_seconds, gathered=False, fused=not rehearse,
        compiled=not rehearse, autocast=True, device="cpu" if rehearse else "cuda",
    )  # fmt: skip
