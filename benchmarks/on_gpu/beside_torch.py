"""Speed of the training step beside `transformers` BertForPreTraining in torch, a round of each in turn.

Both sides train BERT-LARGE on the same rows, in bf16 with fp32 parameters, with all dropout of 0.1, AdamW and clipped
gradients. The torch side has SDPA attention, `torch.compile` and the fused AdamW, and computes the logits of all
tokens, as `transformers` does. Each side is a process that runs a round per line on its stdin.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from on_gpu.cases import Cases
from on_gpu.scale import Scale
from on_gpu.speed import RECIPE
from on_gpu.steps import VOCAB_SIZE, Rounds, Setting, Step, make_batch
from sides import Side, UnsupportedError, serve
from torch_batch import torch_inputs

from bert_jax.config import load_config
from bert_jax.sections import to_dict

COLUMNS = {
    "sequences": "{case}",
    "outcome": "{outcome}",
    "rows": "{rows}",
    "bert_jax, sequences per second": "{jax_sequences_per_second:,.0f}",
    "torch, sequences per second": "{torch_sequences_per_second:,.0f}",
    "bert_jax / torch": "{ratio:.2f} ({lowest:.2f}-{highest:.2f})",
}


def beside_torch(cases: Cases, scale: Scale, script: list[str]) -> None:
    """Measures the ratio of both sides at 128 and at 512 tokens: the median of the rounds' ratios.

    `script` are the arguments of Python for a side, but for its name.
    """

    def compare(seq_len: int) -> dict[str, Any]:
        sides = [_side(name, seq_len, script) for name in ("torch", "jax")]
        try:
            for side in sides:
                side.wait()
            rounds = [[side.round() for side in sides] for _ in range(scale.rounds)]
        finally:
            for side in sides:
                side.close()
        torch_seconds, jax_seconds = zip(*rounds, strict=True)
        ratios = [theirs / ours for theirs, ours in rounds]
        rows = scale.rows[seq_len]
        return {
            "rows": rows,
            "jax_sequences_per_second": rows / statistics.median(jax_seconds),
            "torch_sequences_per_second": rows / statistics.median(torch_seconds),
            "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios),
        }  # fmt: skip

    for seq_len in reversed(scale.lengths):
        cases.measure(f"{seq_len} tokens", lambda seq_len=seq_len: compare(seq_len))


def _side(name: str, seq_len: int, script: list[str]) -> Side:
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if name == "torch":
        environment["JAX_PLATFORMS"] = "cpu"
    return Side(name, [*script, f"{name}:{seq_len}"], environment)


def jax_worker(scale: Scale, seq_len: int) -> None:
    """Serves rounds of the JAX side."""
    setting = Setting(scale.large, scale.rows[seq_len], seq_len, overrides=RECIPE[seq_len])
    serve(lambda: Rounds(Step(setting), scale.round_seconds))


def torch_worker(scale: Scale, seq_len: int, *, on_cpu: bool) -> None:
    """Serves rounds of the torch side; `on_cpu` rehearses without `torch.compile`."""
    serve(lambda: _torch_rounds(scale, seq_len, on_cpu))


def _torch_rounds(scale: Scale, seq_len: int, on_cpu: bool) -> Callable[[], float]:
    import torch
    from transformers import BertConfig, BertForPreTraining

    if not (on_cpu or torch.cuda.is_available()):
        raise UnsupportedError("torch sees no GPU")
    device = "cpu" if on_cpu else "cuda"
    config = load_config(scale.large)
    sizes = to_dict(config.model) | {"vocab_size": VOCAB_SIZE}
    torch.manual_seed(0)
    model = BertForPreTraining(BertConfig(**sizes, attn_implementation="sdpa")).to(device).train()
    forward = model if on_cpu else torch.compile(model)
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(settings.b1, settings.b2), eps=settings.eps,
        weight_decay=settings.weight_decay, fused=not on_cpu,
    )  # fmt: skip
    batch, _ = make_batch(Setting(scale.large, scale.rows[seq_len], seq_len))
    inputs = torch_inputs(batch, device)

    def steps(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            with torch.autocast(device, torch.bfloat16):
                loss = forward(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the device
        return (time.perf_counter() - began) / count

    steps(2)
    count = max(1, round(scale.round_seconds / steps(1)))
    return lambda: steps(count)
