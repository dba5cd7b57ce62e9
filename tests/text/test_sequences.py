"""Encoding of one or two texts as model input."""

from bert_jax.text.sequences import encode_sequence, truncate_pair
from bert_jax.text.tokenizer import Tokenizer


def test_pairs_are_truncated_from_the_longer_text():
    assert truncate_pair([1, 2, 3, 4], [5], 3) == ([1, 2], [5])
    assert truncate_pair([1, 2], [3, 4], 3) == ([1, 2], [3])
    assert truncate_pair([1], [2, 3], 9) == ([1], [2, 3])


def test_special_tokens_and_segments(tokenizer: Tokenizer):
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    one = encode_sequence(tokenizer, [7, 8, 9], None, 8)
    assert (one.input_ids, one.first_length) == ((cls, 7, 8, 9, sep), 5)
    two = encode_sequence(tokenizer, [7, 8, 9], [10, 11], 8)
    assert (two.input_ids, two.first_length) == ((cls, 7, 8, 9, sep, 10, 11, sep), 5)
    assert encode_sequence(tokenizer, [7, 8, 9], None, 4).input_ids == (cls, 7, 8, sep)
    assert encode_sequence(tokenizer, [7, 8, 9], [10, 11], 7).input_ids == (cls, 7, 8, sep, 10, 11, sep)
    assert encode_sequence(tokenizer, [7, 8, 9], [10, 11], 3).input_ids == (cls, sep, sep)
    assert encode_sequence(tokenizer, [], [], 7).input_ids == (cls, sep, sep)
