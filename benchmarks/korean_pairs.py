"""Makes a Korean task for an English encoder: does the second sentence follow the first, or is it from elsewhere?

    python benchmarks/korean_pairs.py KOWIKI.jsonl.gz OUTPUT

Writes OUTPUT/train.jsonl and OUTPUT/dev.jsonl from different articles, with half of the pairs of each kind. A next
sentence directly follows the first one in the same paragraph; a random one is from another article of the same file.
"""

import argparse
import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

from bert_jax.text import sentences

TRAIN, DEV = 4_000, 1_000  # pairs
SHORTEST, LONGEST = 15, 120  # characters of a sentence
Pair = tuple[str, str]


def neighbours(article: str) -> list[Pair]:
    """Returns pairs of consecutive sentences of a paragraph, each sentence in at most one pair."""
    found = []
    for paragraph in article.split("\n"):
        kept = [one for one in sentences.split(paragraph, "ko") if SHORTEST <= len(one) <= LONGEST]
        found += list(zip(kept[::2], kept[1::2], strict=False))
    return found


def task(articles: Sequence[str], count: int, rng: random.Random) -> list[dict[str, str]]:
    """Returns `count` pairs, half of them from two articles. Exits with an error if there are fewer."""
    pairs = [(number, *pair) for number, article in enumerate(articles) for pair in neighbours(article)]
    rng.shuffle(pairs)
    rows = []
    for number, first, second in pairs[:count]:
        label = "next" if len(rows) % 2 else "random"
        while label == "random":
            other, second, _ = rng.choice(pairs)
            if other != number:
                break
        rows.append({"first": first, "second": second, "label": label})
    if len(rows) < count:
        raise SystemExit(f"expected at least {count} pairs, got {len(rows)}; use a larger file")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    rng = random.Random(0)
    with gzip.open(options.input, "rt") as file:
        articles = [json.loads(line)["text"] for line in file]
    rng.shuffle(articles)
    held_out = len(articles) // 8
    options.output.mkdir(parents=True, exist_ok=True)
    for name, of, count in (("dev", articles[:held_out], DEV), ("train", articles[held_out:], TRAIN)):
        rows = task(of, count, rng)
        (options.output / f"{name}.jsonl").write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        )
        print(f"{name}: {len(rows):,} pairs of {len(of):,} articles")


if __name__ == "__main__":
    main()
