"""What tests of preparing share."""

import preparing
import pytest

from bert_jax.data.tokenization import WordPieceTokenizer


@pytest.fixture(scope="session")
def tokenizer(vocabulary_file):
    return WordPieceTokenizer.from_file(str(vocabulary_file))


@pytest.fixture(scope="session")
def whole(tmp_path_factory, corpus_file, tokenizer):
    """The reference for bytes: one worker, one slice."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    preparing.run(corpus_file, tokenizer, folder, bucket_tokens=4096, dupe_factor=2)
    return folder
