"""Training steps of `transformers` in torch, beside which the training step of bert_jax is measured."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from on_gpu.steps import Setting, make_batch, make_model
from processes import UnsupportedError

from bert_jax.batch import HostBatch
from bert_jax.config import load_config
from bert_jax.interop.architectures import model_config

IGNORED = -100
"""Label of a token that is not predicted."""


def torch_inputs(batch: HostBatch, device: str) -> dict[str, Any]:
    """Returns tensors int64 [B, L], with labels for all tokens, and `next_sentence_label` [B]."""
    import torch

    labels = np.full(batch["input_ids"].shape, IGNORED, np.int64)
    row, slot = np.nonzero(batch["masked_weights"])
    labels[row, batch["masked_positions"][row, slot]] = batch["masked_ids"][row, slot]
    arrays = {
        "input_ids": batch["input_ids"], "token_type_ids": batch["token_type_ids"],
        "attention_mask": batch["sequence_ids"], "labels": labels,
        "next_sentence_label": batch["next_sentence_labels"][:, 0],
    }  # fmt: skip
    return {name: torch.as_tensor(array, dtype=torch.long, device=device) for name, array in arrays.items()}


def torch_rounds(
    setting: Setting, seconds: float, *, gathered: bool, fused: bool, compiled: bool, autocast: bool = False,
    device: str = "cpu",
) -> Callable[[], float]:  # fmt: skip
    """Returns a function that runs a round of some `seconds` of a warm step, and returns the seconds of a step.

    Trains BertForPreTraining, or ModernBertForMaskedLM for a model without a pooler, with AdamW of the config.

    Args:
      gathered: computes the logits of the predictions alone.
      fused: has the fused AdamW.
      compiled: has `torch.compile`; UnsupportedError if it fails.
      autocast: computes in bfloat16.
    """
    import torch
    from transformers import BertConfig, BertForPreTraining, ModernBertConfig, ModernBertForMaskedLM

    config = load_config(setting.config)
    settings, sizes = config.optimizer, make_model(config)
    inputs = torch_inputs(make_batch(setting)[0], device)
    torch.manual_seed(0)
    if config.model.pooler:
        model = BertForPreTraining(BertConfig(**sizes.to_dict())).to(device).train()
    else:
        special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
        keys = model_config(sizes) | special | {"sparse_prediction": gathered}
        model = ModernBertForMaskedLM(ModernBertConfig(**keys)).to(device).train()
        inputs = {key: inputs[key] for key in ("input_ids", "attention_mask", "labels")}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(settings.b1, settings.b2), eps=settings.eps,
        weight_decay=settings.weight_decay, fused=fused,
    )  # fmt: skip
    loss = _gathered_loss(model, inputs) if gathered and config.model.pooler else lambda: model(**inputs).loss
    if compiled:
        loss = torch.compile(loss)

    def steps(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                value = loss()
            value.backward()
            if settings.grad_clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        value.item()  # waits for the device
        return (time.perf_counter() - began) / count

    try:
        steps(2)
    except Exception as error:
        if compiled and device == "cpu":
            raise UnsupportedError(f"torch.compile: {type(error).__name__}") from error
        raise
    count = max(1, round(seconds / steps(1)))
    return lambda: steps(count)


def _gathered_loss(model: Any, inputs: dict[str, Any]) -> Callable[[], Any]:
    """Returns the loss of `model(**inputs)` from the logits of predicted tokens alone."""
    import torch
    from torch.nn.functional import cross_entropy

    encoded = {name: inputs[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    labels = inputs["labels"].flatten()
    (places,) = torch.nonzero(labels != IGNORED, as_tuple=True)
    targets, next_sentence = labels[places], inputs["next_sentence_label"]

    def loss() -> Any:
        output = model.bert(**encoded)
        predicted = model.cls.predictions(output.last_hidden_state.flatten(0, 1)[places])
        is_next = model.cls.seq_relationship(output.pooler_output)
        return cross_entropy(predicted, targets) + cross_entropy(is_next, next_sentence)

    return loss
