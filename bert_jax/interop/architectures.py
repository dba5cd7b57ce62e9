"""Model classes of `transformers`: those of BERT with their heads, and others that are refused by name."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.model.bert import HEADS

ARCHITECTURES: dict[str, tuple[str, ...]] = {  # and their heads; a model is written as the first whose heads it has
    "BertForPreTraining": HEADS,
    "BertForMaskedLM": ("mlm_head",),
    "BertLMHeadModel": ("mlm_head",),
    "BertForNextSentencePrediction": ("pooler", "nsp_head"),
    "BertModel": ("pooler",),
}
"""Pre-trained models."""


@dataclass(frozen=True)
class TaskArchitecture:
    """A fine-tuned model: its class, the name of its output layer, and the Hub's name of its pipeline."""

    name: str
    output: str
    pipeline: str


TASK_ARCHITECTURES = {  # by kind of head
    "classify": TaskArchitecture("BertForSequenceClassification", "classifier", "text-classification"),
    "regress": TaskArchitecture("BertForSequenceClassification", "classifier", "text-classification"),
    "choose": TaskArchitecture("BertForMultipleChoice", "classifier", "multiple-choice"),
    "span": TaskArchitecture("BertForQuestionAnswering", "qa_outputs", "question-answering"),
    "tag": TaskArchitecture("BertForTokenClassification", "classifier", "token-classification"),
}

TASK_CLASSES = {architecture.name: architecture for architecture in TASK_ARCHITECTURES.values()}

PIPELINES = {  # of pre-trained models; the Hub has none for next sentences
    "BertForPreTraining": "fill-mask",
    "BertForMaskedLM": "fill-mask",
    "BertLMHeadModel": "text-generation",
    "BertModel": "feature-extraction",
}

_RELATIVE = "its attention has relative positions"
_FOREIGN = {  # by `model_type` of config.json: the difference from BERT
    "albert": "its layers share their weights and its embeddings are factorized",
    "bart": "it has a decoder with cross-attention",
    "big_bird": "its attention is sparse",
    "camembert": "it is a RoBERTa: positions are numbered from 2 and the vocabulary is SentencePiece",
    "convbert": "part of its attention is a convolution",
    "data2vec-text": "it is a RoBERTa: positions are numbered from 2 and the vocabulary is byte-level BPE",
    "deberta": "its attention has disentangled relative positions",
    "deberta-v2": "its attention has disentangled relative positions",
    "distilbert": "it has no token types and no pooler",
    "electra": "it is a discriminator of replaced tokens, with embeddings of a size of their own",
    "ernie": "it has embeddings of task types",
    "eurobert": "its positions are rotary and its layers normalize their inputs",
    "flaubert": "it is an XLM: its vocabulary is BPE and it has embeddings of languages",
    "fnet": "it has Fourier transforms instead of attention",
    "funnel": "its layers shorten the sequence",
    "gpt2": "it is a left-to-right model that normalizes the inputs of its layers",
    "layoutlm": "it has embeddings of positions on a page",
    "longformer": "its attention is sparse",
    "luke": "it has embeddings of entities",
    "megatron-bert": "its layers normalize their inputs",
    "mobilebert": "its layers have bottlenecks",
    "modernbert": "its positions are rotary, its layers normalize their inputs, and its attention is partly local",
    "mpnet": _RELATIVE,
    "neobert": "its positions are rotary and its layers normalize their inputs",
    "nomic_bert": "its positions are rotary",
    "nystromformer": "its attention is approximate",
    "rembert": "its embeddings are factorized, and the output matrix is not tied to them",
    "roberta": "positions are numbered from 2 and the vocabulary is byte-level BPE",
    "roberta-prelayernorm": "it is a RoBERTa whose layers normalize their inputs",
    "roc_bert": "it has embeddings of shapes and of pronunciations",
    "roformer": "its positions are rotary",
    "splinter": "its head selects questions",
    "squeezebert": "its dense layers are grouped convolutions",
    "t5": "it has a decoder with cross-attention, and relative positions",
    "tapas": "it has embeddings of rows and columns of a table",
    "xlm": "its vocabulary is BPE and it has embeddings of languages",
    "xlm-roberta": "it is a RoBERTa: positions are numbered from 2 and the vocabulary is SentencePiece",
    "xlm-roberta-xl": "it is a RoBERTa whose layers normalize their inputs",
    "xlnet": "it predicts tokens in permuted orders, with relative positions",
    "xmod": "it has adapters for each language",
    "yoso": "its attention is approximate",
}
_NOT_HONOURED: dict[str, tuple[Any, ...]] = {  # fields of config.json: the supported values
    "position_embedding_type": (None, "absolute"),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
}


def check_is_bert(path: epath.Path, values: Mapping[str, Any]) -> None:
    """Raises InputError, with the difference from BERT, for the config of another architecture or of a variant."""
    kind = values.get("model_type")
    if kind not in (None, "bert"):
        difference = f": {_FOREIGN[kind]}" if isinstance(kind, str) and kind in _FOREIGN else ""
        raise InputError(f"{path}: model_type={kind!r:.60} is not BERT{difference}; expected model_type='bert'")
    for field, supported in _NOT_HONOURED.items():
        if values.get(field) not in supported:
            raise InputError(f"{path}: {field}={values[field]!r} is not supported; expected {supported[-1]!r}")


def named_architectures(path: epath.Path, values: Mapping[str, Any]) -> list[str]:
    """Returns the model classes listed in `config.json`, [] if absent.

    Raises InputError if it is not a list of names, or names a class that is not supported.
    """
    named = values.get("architectures")
    if named is None:
        return []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise InputError(f"{path}: architectures={named!r:.60}: expected a list of names")
    known = (*ARCHITECTURES, *TASK_CLASSES)
    if unknown := [name for name in named if name not in known]:
        raise InputError(f"{path}: architectures={unknown} is not supported; expected one of {', '.join(known)}")
    return named


def required_heads(named: Collection[str]) -> set[str]:
    """Returns the heads that these pre-trained classes always have; the pooler of BertModel is optional."""
    return {head for name in named if name != "BertModel" for head in ARCHITECTURES.get(name, ())}
