"""Fixtures of the data tests."""

import pytest
from support import preparing

from bert_jax.data.dataset import PreparedDataset


@pytest.fixture(scope="session")
def dataset(dataset_dir):
    return PreparedDataset(str(dataset_dir))


@pytest.fixture(scope="session")
def whole(tmp_path_factory, corpus_file, tokenizer):
    """The reference for bytes: one worker, one slice."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    preparing.run(corpus_file, tokenizer, folder, bucket_tokens=4096, dupe_factor=2)
    return folder
