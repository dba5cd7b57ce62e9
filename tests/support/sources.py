"""Models with random weights, as checkpoints and as Hugging Face folders, and edits that make a folder invalid."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, normalizers, pre_tokenizers

from bert_jax.errors import InputError
from bert_jax.interop import huggingface
from bert_jax.interop.importing import import_checkpoint
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.bert import HEADS, Parameters
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_jax.text.wordpiece import wordpiece_tokenizer
from bert_jax.training.checkpoints import Checkpoint, open_checkpoint, save_parameters

# Two layers, so that tests detect swapped layers; three heads of 16, so that all sizes differ.
SIZES = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96,
    "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip


RECORDS: dict[str, tuple[int, dict[str, Any]]] = {
    "classify": (3, {"name": "text", "classes": ["a", "b", "c"], "texts": [], "id": "id", "is_pair": False}),
    "choose": (2, {"name": "choice"}),
    "tag": (3, {"name": "ner", "tags": ["O", "B-SEA", "I-SEA"], "document_context": False}),
    "span": (2, {"name": "squad/1.1", "doc_stride": 16, "max_query_length": 8}),
}
"""Sizes of heads, and records of tasks, by kind."""


def random_parameters(config: BertConfig, heads: Collection[str]) -> Parameters:
    """Draws all parameters at random, also biases and LayerNorms; the padding of the vocabulary is zero."""
    rng = np.random.default_rng(0)
    _, shapes, _ = abstract_parameters(config, heads=heads)
    parameters = jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(np.float32), shapes)
    parameters["embeddings"]["word"][config.vocab_size :] = 0
    if "mlm_head" in heads:
        parameters["mlm_head"]["output_bias"][config.vocab_size :] = 0
    return parameters


def write_checkpoint(
    folder: Path, vocabulary: list[str] | Tokenizer, heads: Collection[str] = HEADS, **sizes: object
) -> Checkpoint:
    tokenizer = wordpiece_tokenizer(vocabulary, lowercase=True) if isinstance(vocabulary, list) else vocabulary
    config = BertConfig(**{"vocab_size": tokenizer.vocab_size, **SIZES, **sizes})  # type: ignore[arg-type]
    save_parameters(
        epath.Path(folder), random_parameters(config, heads), bert_config=config, tokenizer=tokenizer, heads=heads
    )
    return open_checkpoint(str(folder))


def write_fine_tuned(
    folder: Path, before: Checkpoint, kind: str, record: dict[str, Any] | None = None, *, size: int = 0
) -> Checkpoint:
    """Writes a fine-tuned checkpoint with the sizes and the vocabulary of `before`, and random parameters."""
    size, record = (size, record) if record else RECORDS[kind]
    head = TaskHead(kind, size)
    _, shapes, _ = abstract_parameters(before.bert_config, build=BertForTask, head=head)
    rng = np.random.default_rng(0)
    parameters = jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(np.float32), shapes)
    save_parameters(
        epath.Path(folder), parameters, bert_config=before.bert_config, tokenizer=before.tokenizer,
        heads=("pooler",) if "pooler" in parameters else (), task={**head.to_dict(), "max_seq_len": 48, **record},
    )  # fmt: skip
    return open_checkpoint(str(folder))


def write_source(folder: Path, vocabulary: list[str], heads: Collection[str] = HEADS, **sizes: object) -> Path:
    """Writes a Hugging Face folder, without torch."""
    checkpoint = write_checkpoint(folder.with_name(f"{folder.name}-checkpoint"), vocabulary, heads, **sizes)
    huggingface.export(checkpoint, str(folder))
    return folder


def write_tokenizer(folder: Path, vocabulary: list[str], *, lowercase: bool = True) -> None:
    """Writes the tokenizer files of a typical folder, with `vocab.txt`."""
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    tokenizer = FastTokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"do_lower_case": lowercase, "tokenizer_class": "BertTokenizer"})
    )


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def edit_weights(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    weights = weights_of(folder)
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(path: Path, **values: object) -> None:
    """Updates keys of a JSON file; None deletes a key."""
    merged = {**(json.loads(path.read_text()) if path.exists() else {}), **values}
    path.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))


def assert_same_parameters(a: Parameters, b: Parameters) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_reads_as(folder: Path, source: Path) -> None:
    found = import_checkpoint(str(folder), str(folder.with_name("imported")))
    before = import_checkpoint(str(source), str(folder.with_name("before")))
    assert found.heads == before.heads
    assert_same_parameters(found.load_parameters(), before.load_parameters())


def refused(folder: Path, *messages: str, **options) -> None:
    with pytest.raises(InputError) as refusal:
        import_checkpoint(str(folder), str(folder.with_name("output")), **options)
    for message in messages:
        assert message in str(refusal.value)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # no output, not even partial
