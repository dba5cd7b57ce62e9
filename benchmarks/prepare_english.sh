#!/usr/bin/env bash
# Makes the vocabulary and the datasets of the runs on English text, unless they already exist.
#
#   benchmarks/prepare_english.sh DATA OUTPUT [PAIRS]
#
# DATA holds corpus/enwiki/*.jsonl.gz and corpus/books/*.txt.gz: 36 M tokens of English. Writes OUTPUT/tokenizer.json (8,192
# pieces), and OUTPUT/data32 and OUTPUT/data128 with sequences of 32 and 128 tokens;
# with PAIRS=sop OUTPUT/data32-sop and OUTPUT/data128-sop.
set -euo pipefail

data=$1
out=$2
pairs=${3:-nsp}
suffix=${3:+-$3}
corpus=("$data/corpus/enwiki/*.jsonl.gz" "$data/corpus/books/*.txt.gz")
export JAX_PLATFORMS=cpu
mkdir -p "$out"

[ -e "$out/tokenizer.json" ] || bert-jax vocab --input "${corpus[@]}" --documents file --size 8192 --output "$out/tokenizer.json"
for length in 32 128; do
  [ -e "$out/data$length$suffix/dataset.json" ] ||
    bert-jax prepare --input "${corpus[@]}" --documents file --vocab "$out/tokenizer.json" --output "$out/data$length$suffix" \
      --seq_len $length --pairs "$pairs"
done
