#!/usr/bin/env bash
# Runs the reference run: BERT-Tiny on English Wikipedia and books, on a CPU, killed once with -9 and resumed.
#
#   BERT_JAX_DATA=FOLDER benchmarks/reference_cpu.sh [OUTPUT]
#
# FOLDER holds corpus/enwiki/*.jsonl.gz and corpus/books/*.txt.gz: 36 M tokens of English. Writes the curves, the final
# evaluation and metrics.jsonl to OUTPUT (runs/reference_cpu by default). A thousand steps take at most two minutes on
# two cores.
set -euo pipefail

data=${BERT_JAX_DATA:?is not set; set it to the folder of the corpora}
out=${1:-runs/reference_cpu}
kill_at=7000
export JAX_PLATFORMS=cpu
"$(dirname "$0")/prepare_english.sh" "$data" "$out"

train=(bert-jax pretrain --config="$(dirname "$0")/reference_cpu.py" --workdir="$out/run"
  --config.phases.0.data.path="$out/data32" --config.phases.1.data.path="$out/data128")
if [ ! -e "$out/killed" ]; then
  "${train[@]}" &
  pid=$!
  until grep -q "\"step\": $((kill_at + 50))," "$out/run/metrics.jsonl" 2>/dev/null; do
    kill -0 $pid
    sleep 1
  done
  kill -9 $pid
  wait $pid || true
  tail -n 1 "$out/run/metrics.jsonl" | tee "$out/killed"
fi
"${train[@]}"

bert-jax evaluate --checkpoint "$out/run" --data "$out/data128" | tee "$out/evaluation.json"
bert-jax report "$out/run" --output "$out/report.html"
