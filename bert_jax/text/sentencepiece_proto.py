"""The protocol buffer of a SentencePiece model file, as far as this package reads it; other fields are kept.

Field numbers are those of `sentencepiece_model.proto` of google/sentencepiece. Its compiled module is not used: that of
sentencepiece 0.2.3 requires protobuf 7, which TensorFlow Datasets and TensorBoard do not support.
"""

import functools
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from bert_jax.errors import InputError

UNIGRAM, BPE = 1, 2
"""Values of `trainer_spec.model_type`."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of a piece's `type`."""

_TYPES = descriptor_pb2.FieldDescriptorProto
_FIELDS: dict[str, tuple[tuple[str, int, Any], ...]] = {  # message: name, number and type of its fields
    "Piece": (("piece", 1, _TYPES.TYPE_STRING), ("score", 2, _TYPES.TYPE_FLOAT), ("type", 3, _TYPES.TYPE_INT32)),
    "TrainerSpec": (
        ("model_type", 3, _TYPES.TYPE_INT32),
        ("treat_whitespace_as_suffix", 24, _TYPES.TYPE_BOOL),
        ("byte_fallback", 35, _TYPES.TYPE_BOOL),
    ),
    "NormalizerSpec": (
        ("name", 1, _TYPES.TYPE_STRING),
        ("precompiled_charsmap", 2, _TYPES.TYPE_BYTES),
        ("add_dummy_prefix", 3, _TYPES.TYPE_BOOL),
        ("remove_extra_whitespaces", 4, _TYPES.TYPE_BOOL),
        ("escape_whitespaces", 5, _TYPES.TYPE_BOOL),
    ),
}


def parse(data: bytes) -> Any:
    """Parses a model file: `pieces` (`piece`, `score`, `type`), `trainer_spec` and `normalizer_spec`.

    Raises:
      InputError: the bytes are not a SentencePiece model.
    """
    model = _model_class()()
    try:
        model.ParseFromString(data)
    except message.DecodeError as error:
        raise InputError("not a SentencePiece model; expected a file of sentencepiece or `bert-jax vocab`") from error
    # A string that is no UTF-8 is read as bytes.
    if not all(isinstance(text, str) for text in (model.normalizer_spec.name, *(one.piece for one in model.pieces))):
        raise InputError("the SentencePiece model is damaged (a name is not UTF-8); restore the file")
    if not model.pieces:
        raise InputError("the SentencePiece model has no pieces; expected a file of sentencepiece or `bert-jax vocab`")
    return model


@functools.cache
def _model_class() -> type[message.Message]:
    file = descriptor_pb2.FileDescriptorProto(name="bert_jax_sentencepiece.proto", package="bert_jax", syntax="proto2")
    for name, fields in _FIELDS.items():
        described = file.message_type.add(name=name)
        for field, number, kind in fields:
            described.field.add(name=field, number=number, type=kind, label=_TYPES.LABEL_OPTIONAL)
    described = file.message_type.add(name="Model")
    for number, (field, name, label) in enumerate(
        (
            ("pieces", "Piece", _TYPES.LABEL_REPEATED),
            ("trainer_spec", "TrainerSpec", _TYPES.LABEL_OPTIONAL),
            ("normalizer_spec", "NormalizerSpec", _TYPES.LABEL_OPTIONAL),
        ),
        start=1,
    ):
        described.field.add(
            name=field, number=number, type=_TYPES.TYPE_MESSAGE, type_name=f".bert_jax.{name}", label=label
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    result: type[message.Message] = message_factory.GetMessageClass(pool.FindMessageTypeByName("bert_jax.Model"))
    return result
