"""Random damage of files: bits, pieces, tokens of the formats, and numbers that are too large."""

import random
from collections.abc import Callable, Sequence

TOKENS = (
    b"\x00", b"\xef\xbb\xbf", b"\xff\xfe", b"\r", b"\n", b"\r\n", b"\xe2\x80\xa8", b"\xed\xa0\xbd", b"\xc3",
    b"\\ud83d",
    b'"', b'""', b"'", b",", b"\t", b";", b"{", b"}", b"[", b"]", b"[" * 3000, b'{"a":' * 3000, b"null", b"true",
    b"NaN",
    b"Infinity",
    b"-1", b"0", b"1e999", b"9" * 400, b"18446744073709551616", b"-9223372036854775809",
    b"../../etc/passwd",
    b"/", b".", b"..", b"<doc", b"</doc>", b"[UNK]", b"[PAD]", b"[MASK]", b"##", b"-DOCSTART-", b"O", b"B-", b"I-X",
    b"\xf0\x9f\x98\x80", b"\xe4\xb8\xad", b"\x1f\x8b", b"PAR1", b"\x28\xb5\x2f\xfd", b"--config.", b"=", b"(", b")",
    b"__",
)  # fmt: skip
"""Pieces of the formats, and what parsers stumble over."""

_NUMBERS = (b"-1", b"0", b"1", b"4294967296", b"9223372036854775807", b"1e400", b"1.5", b"9" * 40)


def mutate(seed: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Returns a seed after one to five random changes; `others` are seeds that it may take pieces of."""
    content = bytearray(seed)
    for _ in range(rng.randint(1, 5)):
        rng.choice(_CHANGES)(content, others, rng)
    return bytes(content)


def _place(content: bytearray, rng: random.Random) -> int:
    return rng.randrange(len(content) + 1)


def _piece(content: Sequence[int], rng: random.Random) -> slice:
    start = rng.randrange(len(content) + 1)
    return slice(start, start + rng.choice((1, 2, 4, 8, 32, 256)))


def _flip(content: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def _replace(content: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    if content:
        content[rng.randrange(len(content))] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _delete(content: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    del content[_piece(content, rng)]


def _repeat(content: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    place, piece = _place(content, rng), bytes(content[_piece(content, rng)])
    content[place:place] = piece * rng.choice((1, 2, 50))


def _insert(content: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    place = _place(content, rng)
    content[place:place] = rng.choice(TOKENS)


def _cut(content: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    del content[_place(content, rng) :]


def _splice(content: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    other = rng.choice(others)
    content[_piece(content, rng)] = other[_piece(other, rng)]


def _number(content: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    """Replaces a run of digits, or eight bytes of a binary format."""
    start = _place(content, rng)
    digits = next((place for place in range(start, len(content)) if 48 <= content[place] <= 57), None)
    if digits is None or rng.random() < 0.2:
        content[start : start + 8] = rng.choice((b"\xff" * 8, b"\x00" * 8, (1 << 62).to_bytes(8, "little")))
        return
    end = digits
    while end < len(content) and 48 <= content[end] <= 57:
        end += 1
    content[digits:end] = rng.choice(_NUMBERS)


_CHANGES: tuple[Callable[[bytearray, Sequence[bytes], random.Random], None], ...] = (
    _flip, _flip, _replace, _delete, _repeat, _insert, _insert, _cut, _splice, _number, _number,
)  # fmt: skip
