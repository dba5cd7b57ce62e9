"""Random models that `transformers` saves, and their outputs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import sources

from bert_jax.batch import HostBatch

LABELS = {
    "BertForSequenceClassification": ["bad", "fair", "good"],
    "BertForTokenClassification": ["O", "B-PER", "I-PER"],
}


def require_torch() -> tuple[Any, Any]:
    """Returns torch and transformers; skips the test without them."""
    reason = "needs the parity extra: torch and transformers"
    return pytest.importorskip("torch", reason=reason), pytest.importorskip("transformers", reason=reason)


def save_torch(folder: Path, vocabulary: list[str], architecture: str, *, dtype: Any = None, **fields: Any) -> Any:
    """Saves a model of a class of `transformers`, "BertModel without pooler" or "regression", and returns it.

    No bias is zero, and no scale of a LayerNorm is one.
    """
    torch, transformers = require_torch()
    if architecture == "regression":
        architecture, fields = "BertForSequenceClassification", {"num_labels": 1, **fields}
    elif architecture in LABELS:
        names = LABELS[architecture]
        labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
        fields = {**labels, **fields}
    fields = {"is_decoder": architecture == "BertLMHeadModel", **fields}
    config = transformers.BertConfig(vocab_size=len(vocabulary), **{**sources.SIZES, **fields})
    torch.manual_seed(0)
    options = {"add_pooling_layer": False} if architecture == "BertModel without pooler" else {}
    model = getattr(transformers, architecture.split()[0])(config, **options).to(dtype or torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.06)
            if name.endswith("LayerNorm.weight"):
                parameter += 1
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    sources.edit_json(folder / "tokenizer_config.json", do_lower_case=True)
    return model.eval()


def torch_outputs(model: Any, batch: HostBatch) -> Any:
    """Returns the outputs of a model, with its hidden states, for our batch of texts."""
    torch, _ = require_torch()
    names = {"input_ids": "input_ids", "token_type_ids": "token_type_ids", "attention_mask": "sequence_ids"}
    given = {name: torch.tensor(np.asarray(batch[ours])).long() for name, ours in names.items()}
    if type(model).__name__ == "BertForMultipleChoice":
        given = {name: value[None] for name, value in given.items()}
    with torch.no_grad():
        return model(**given, output_hidden_states=True)
