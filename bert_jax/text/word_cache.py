"""Text to ids at several times the tokenizer's speed: what has been tokenized once is remembered.

BERT's tokenization knows nothing beyond a word, so the ids of a text are those of its words, one after the other; and a
few words make up most of any text. Words are parted by U+0020 alone: of what else ends a word, Unicode and BERT have
ideas of their own, and the tokenizer is asked.
"""

import functools
import threading
from collections.abc import Sequence

import numpy as np

from bert_jax.text.tokenization import WordPieceTokenizer, token_dtype

CAPACITY = 1 << 20
"""Words that are remembered: some 200 MB. Then it begins anew."""

_LONGEST = 32  # characters; longer ones do not come again


class WordCache:
    """What a tokenizer makes of words, by word. Threads, such as those of a Beam worker, wait for each other."""

    def __init__(self, tokenizer: WordPieceTokenizer):
        self.tokenizer = tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        self._ids: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, without [CLS] and [SEP], as the bytes of an array of `dtype`.

        They are those of `WordPieceTokenizer.encode_batch`.
        """
        split = [text.split(" ") for text in texts]
        with self._lock:
            return self._encode(split)

    def _encode(self, split: list[list[str]]) -> list[bytes]:
        if len(self._ids) > CAPACITY:
            self._ids.clear()
        new = list({word for words in split for word in words if word not in self._ids})
        for word, ids in zip(new, self.tokenizer.encode_batch(new), strict=True):
            self._ids[word] = np.array(ids, self.dtype).tobytes()
        encoded = [b"".join(map(self._ids.__getitem__, words)) for words in split]
        for word in new:
            if len(word) > _LONGEST:
                del self._ids[word]
        return encoded


@functools.lru_cache(maxsize=4)
def word_cache(tokenizer: WordPieceTokenizer) -> WordCache:
    """The one of this process for a tokenizer."""
    return WordCache(tokenizer)
