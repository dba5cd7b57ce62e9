"""An encoder with its initial values, to fine-tune."""

from pathlib import Path

import jax
import pytest
from etils import epath
from support import helpers

from bert_jax.model import BertConfig, initialize
from bert_jax.model.bert import HEADS
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.vocabulary_options import VocabularyOptions
from bert_jax.text.vocabulary_training import train_vocabulary
from bert_jax.text.wordpiece import wordpiece_tokenizer
from bert_jax.training.checkpoints import save_parameters


def save_encoder(folder: Path, tokenizer: Tokenizer) -> Path:
    model = BertConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    parameters = jax.jit(lambda key: initialize(model, key)[1])(jax.random.key(0))
    save_parameters(epath.Path(folder), parameters, bert_config=model, tokenizer=tokenizer, heads=HEADS)
    return folder


@pytest.fixture(scope="session")
def checkpoint(vocabulary: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with its initial values."""
    return save_encoder(tmp_path_factory.mktemp("encoder") / "encoder", wordpiece_tokenizer(vocabulary, lowercase=True))


@pytest.fixture(scope="session")
def sentencepiece_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with its initial values and a BPE vocabulary, in which some words are several pieces."""
    corpus = helpers.make_corpus(80).split("\n")
    tokenizer = train_vocabulary(corpus, VocabularyOptions(kind="bpe", size=150))
    return save_encoder(tmp_path_factory.mktemp("encoder") / "encoder", tokenizer)
