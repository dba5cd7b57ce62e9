"""ModernBERTs with random weights that `transformers` saves, with a small byte-level tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np
from support import sources
from support.torch_models import require_torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from bert_jax.text.tokenizer import SPECIAL_TOKENS

SIZES = {
    "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 2,
    "local_attention": 16, "max_position_embeddings": 8192,
}  # fmt: skip
SWITCHES = {  # of BertConfig
    "position_embedding_type": "rotary", "global_attn_every_n_layers": 3, "local_attention": 16, "pre_norm": True,
    "gated_mlp": True, "attention_bias": False, "mlp_bias": False, "norm_bias": False, "classifier_bias": False,
    "pooler": False, "type_vocab_size": 0, "depth_scaled_init": True, "layer_norm_eps": 1e-5,
}  # fmt: skip
LABELS = ["bad", "fair", "good"]
TEXTS = ["the cat sat on the mat .", "a dog runs in the long garden , where it barks .", "it rains ."]


def tokenizer() -> FastTokenizer:
    """Trains a byte-level BPE with BERT's special tokens, as ModernBERT has."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet)
    )
    return fast


def save_torch(folder: Path, architecture: str = "ModernBertForMaskedLM", **fields: Any) -> Any:
    """Saves a model of a class of `transformers` with its tokenizer, and returns it; no norm's scale is one."""
    torch, transformers = require_torch()
    fast = tokenizer()
    ids = {f"{role}_token_id": fast.token_to_id(token) for role, token in
           (("pad", "[PAD]"), ("cls", "[CLS]"), ("sep", "[SEP]"), ("bos", "[CLS]"), ("eos", "[SEP]"))}  # fmt: skip
    if architecture.endswith(("SequenceClassification", "TokenClassification")) and "num_labels" not in fields:
        fields = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}, **fields}
    config = transformers.ModernBertConfig(vocab_size=fast.get_vocab_size(), **{**SIZES, **ids, **fields})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.06)
            if name.endswith("norm.weight"):
                parameter += 1
    model.save_pretrained(folder)
    fast.save(str(folder / "tokenizer.json"))
    sources.edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    return model.eval()


def torch_outputs(model: Any, batch: Any, **options: Any) -> Any:
    """Returns the outputs of a model for our batch of texts."""
    torch, _ = require_torch()
    given = {"input_ids": batch["input_ids"], "attention_mask": (np.asarray(batch["sequence_ids"]) > 0)}
    tensors = {name: torch.tensor(np.asarray(value)).long() for name, value in given.items()}
    if type(model).__name__ == "ModernBertForMultipleChoice":
        tensors = {name: value[None] for name, value in tensors.items()}
    return model(**tensors, **options)
