"""Import of the tokenizer of a Hugging Face folder: WordPiece or SentencePiece."""

from etils import epath

from bert_jax.interop.source_tokenizers import sentencepiece_source, wordpiece_source
from bert_jax.text.tokenizer import Tokenizer


def read_tokenizer(folder: epath.Path, *, lowercase: bool | None = None) -> Tokenizer:
    """Reads a SentencePiece model if the folder has one, else `vocab.txt`, `tokenizer.json`, or both.

    `lowercase` overrides the setting of a WordPiece tokenizer's files.

    Raises InputError if the files are missing, contradict each other, or are of a tokenizer that this package does not
    have, such as one with added tokens.
    """
    model = sentencepiece_source.find_model(folder)
    if model is not None:
        return sentencepiece_source.read_tokenizer(folder, model, lowercase=lowercase)
    return wordpiece_source.read_tokenizer(folder, lowercase=lowercase)
