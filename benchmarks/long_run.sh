#!/usr/bin/env bash
# Runs the long run: BERT-Tiny on 400 M tokens of English Wikipedia and books, on a CPU.
#
#   BERT_JAX_DATA=FOLDER benchmarks/long_run.sh [OUTPUT [--config.KEY=VALUE ...]]
#
# FOLDER holds corpus/enwiki/*.jsonl.gz, corpus/books/*.txt.gz and vocab/bert-base-uncased-vocab.txt. Writes the run, its
# milestones and a report to OUTPUT (runs/long by default). Takes many hours; the same command continues a run that was
# stopped.
set -euo pipefail

data=${BERT_JAX_DATA:?is not set; set it to the folder of the corpora}
out=${1:-runs/long}
shift || true
here=$(dirname "$0")
export JAX_PLATFORMS=cpu
mkdir -p "$out"
[ -e "$out/tokenizer.json" ] || bert-jax vocab --from "$data/vocab/bert-base-uncased-vocab.txt" --output "$out/tokenizer.json"
"$here/prepare_english.sh" "$data" "$out" # with this vocabulary
bert-jax pretrain --config="$here/long_run.py" --workdir="$out/run" \
  --config.phases.0.data.path="$out/data32" --config.phases.1.data.path="$out/data128" "$@"
bert-jax evaluate --checkpoint "$out/run" --data "$out/data128" | tee "$out/evaluation.json"
bert-jax report "$out/run" --output "$out/report.html"
