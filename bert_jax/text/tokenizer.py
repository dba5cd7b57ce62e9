"""The interface of tokenizers: text to ids and back, word starts, and the files of other libraries.

`WordPieceTokenizer` and `SentencePieceTokenizer` implement it; `tokenizer_files` opens either.
"""

import abc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tokenizers
from tokenizers import processors

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens of a vocabulary, in the order of their ids (from 0) in a vocabulary that `bert-jax vocab` trains."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype in which token ids are stored."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Tokenizer(abc.ABC):
    """Tokenizer of a vocabulary. Immutable; pickles as its vocabulary and its rules.

    Attributes:
      kind: the name of the kind in files: "wordpiece" or "sentencepiece".
      vocabulary_file: the name of the vocabulary's file in a folder.
      vocab: the pieces; the index is the id.
      special_tokens: the pieces of [PAD], [UNK], [CLS], [SEP] and [MASK], in this order.
      lowercase: whether text is lower-cased.
      strip_accents: whether accents are stripped.
      vocab_size: the number of pieces, V.
      pad_id, unk_id, cls_id, sep_id, mask_id: ids of the special tokens.
      continuation: [V] bool, the pieces that are written without a space before them, such as `##ing`.
    """

    kind: ClassVar[str]
    vocabulary_file: ClassVar[str]
    strip_accents: bool
    continuation: np.ndarray

    def __init__(self, vocab: tuple[str, ...], lowercase: bool, special_tokens: tuple[str, ...]) -> None:
        """Numbers the pieces. `vocab` contains the special tokens, in the order of `SPECIAL_TOKENS`."""
        self.vocab = vocab
        self.lowercase = lowercase
        self.special_tokens = special_tokens
        self.vocab_size = len(vocab)
        self._ids = {piece: index for index, piece in enumerate(vocab)}
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (self._ids[t] for t in special_tokens)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vocab_size} pieces, lowercase={self.lowercase}, sha256={self.sha256[:8]})"

    @property
    @abc.abstractmethod
    def title(self) -> str:
        """The name of the algorithm, for readers."""

    @property
    @abc.abstractmethod
    def sha256(self) -> str:
        """Hash that is equal if ids have the same meaning."""

    @property
    @abc.abstractmethod
    def fast_tokenizer(self) -> tokenizers.Tokenizer:
        """The same tokenizer in the format of `tokenizers`, which `transformers` reads."""

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Returns the complete tokenizer as JSON, for a checkpoint."""

    @abc.abstractmethod
    def described_rules(self) -> dict[str, Any]:
        """Returns the rules that are not the default, as in `dataset.json` beside `kind` and `lowercase`."""

    @abc.abstractmethod
    def vocabulary_bytes(self) -> bytes:
        """Returns the contents of `vocabulary_file`."""

    @abc.abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, without [CLS] and [SEP]. A literal "[SEP]" or "[MASK]" is ordinary text.

        The ids of a text are those of its words, split at U+0020, one after the other.
        """

    @abc.abstractmethod
    def encode_batch_with_offsets(self, texts: list[str]) -> list[tuple[list[int], np.ndarray]]:
        """Returns the ids of each text as `encode_batch` does, and the character offsets of each token.

        Returns:
          For each text, n ids and [n, 2] int32 offsets: a token is `text[begin:end]`, in characters of the original
          text, before it is cleaned or lower-cased. Begins and ends never decrease. Pieces of one character share its
          offsets.
        """

    @abc.abstractmethod
    def encode_with_special_tokens(self, text: str, pair: str | None = None) -> tuple[list[int], list[int]]:
        """Encodes [CLS] text [SEP] or [CLS] text [SEP] pair [SEP]; literal special tokens in a text become their ids.

        Returns:
          `input_ids` and `token_type_ids`, which are 1 for the pair and its [SEP], else 0.
        """

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Joins pieces to text; special tokens are kept.

        Raises:
          IndexError: an id outside [0, V).
        """

    @abc.abstractmethod
    def piece_text(self, index: int) -> str:
        """Returns the text of a piece, without the mark of a word's start or continuation."""

    @abc.abstractmethod
    def huggingface_settings(self) -> dict[str, Any]:
        """Returns the entries of `tokenizer_config.json` that describe the case and the splitting of text."""

    def continues_word(self, input_ids: np.ndarray) -> np.ndarray:
        """Returns bool [B, L]: the tokens of `input_ids` [B, L] that belong to the word of the token before them."""
        result: np.ndarray = self.continuation[input_ids]
        return result

    def id_to_token(self, index: int) -> str:
        """Returns the piece of an id. Raises IndexError for an id outside [0, V)."""
        if not 0 <= index < self.vocab_size:
            raise IndexError(f"index={index}: expected an id in [0, {self.vocab_size})")
        return self.vocab[index]

    def token_to_id(self, token: str) -> int:
        """Returns the id of a piece, or that of [UNK] for an unknown one."""
        return self._ids.get(token, self.unk_id)

    def save_huggingface(self, folder: str, model_max_length: int) -> None:
        """Writes the files that `transformers` reads a tokenizer from: tokenizer.json, its configs, and the vocabulary.

        Its AutoTokenizer returns the ids of `encode_with_special_tokens`. Its class is the generic one, which follows
        tokenizer.json: BertTokenizer of version 5 limits words to 100 characters, whatever that file says.

        Args:
          folder: a local folder; created if missing.
          model_max_length: the number of positions of the model.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        names = ("pad", "unk", "cls", "sep", "mask")
        special = {f"{name}_token": piece for name, piece in zip(names, self.special_tokens, strict=True)}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            **self.huggingface_settings(),
            "model_max_length": model_max_length,
            **special,
        }
        (path / self.vocabulary_file).write_bytes(self.vocabulary_bytes())
        (path / "tokenizer.json").write_text(self.fast_tokenizer.to_str(pretty=True), encoding="utf-8")
        (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        (path / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


def add_special_tokens(fast: tokenizers.Tokenizer, tokenizer: Tokenizer) -> None:
    """Makes a tokenizer of `tokenizers` recognize special tokens in text, and add [CLS] and [SEP]."""
    _, _, cls, sep, _ = tokenizer.special_tokens
    fast.add_special_tokens(list(tokenizer.special_tokens))
    fast.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, tokenizer.cls_id), (sep, tokenizer.sep_id)],
    )
