"""A model of random parameters, in the formats of bert_jax and of `transformers`."""

from pathlib import Path

import jax
from etils import epath

from bert_jax.interop import huggingface
from bert_jax.model import BertConfig, initialize
from bert_jax.model.bert import HEADS
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpoints import open_checkpoint, save_parameters


def write_random_model(folder: Path, config: BertConfig, tokenizer: Tokenizer) -> None:
    """Writes the checkpoint FOLDER/checkpoint, and its export FOLDER/huggingface."""
    _, parameters = jax.jit(lambda: initialize(config, jax.random.key(0)))()
    checkpoint = folder / "checkpoint"
    save_parameters(epath.Path(checkpoint), parameters, bert_config=config, tokenizer=tokenizer, heads=HEADS)
    huggingface.export(open_checkpoint(str(checkpoint)), str(folder / "huggingface"))
