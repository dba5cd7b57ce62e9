#!/usr/bin/env bash
# Makes the vocabulary and the datasets of reference_cpu.sh and small_study.sh, unless they already exist.
#
#   benchmarks/prepare_english.sh DATA OUTPUT
#
# DATA holds corpus/enwiki/*.jsonl.gz and corpus/books/*.txt.gz: 36 M tokens of English. Writes OUTPUT/tokenizer.json (8,192
# pieces), and OUTPUT/data32 and OUTPUT/data128 with sequences of 32 and 128 tokens.
set -euo pipefail

data=$1
out=$2
corpus=("$data/corpus/enwiki/*.jsonl.gz" "$data/corpus/books/*.txt.gz")
export JAX_PLATFORMS=cpu
mkdir -p "$out"

[ -e "$out/tokenizer.json" ] || bert-jax vocab --input "${corpus[@]}" --documents file --size 8192 --output "$out/tokenizer.json"
for length in 32 128; do
  [ -e "$out/data$length/dataset.json" ] ||
    bert-jax prepare --input "${corpus[@]}" --documents file --vocab "$out/tokenizer.json" --output "$out/data$length" \
      --seq_len $length
done
