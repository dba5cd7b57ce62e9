#!/usr/bin/env bash
# A study at the size of a laptop: BERT-Tiny pre-trained in three ways and not at all, on tasks that are real.
#
#   BERT_JAX_DATA=FOLDER benchmarks/small_study.sh [OUTPUT] [--config.KEY=VALUE ...]
#
# FOLDER holds corpus/enwiki/*.jsonl.gz, corpus/books/*.txt.gz and corpus/kowiki/kowiki.jsonl.gz, glue/, squad/, wnut17/
# and codah/. Vocabulary and datasets are those of reference_cpu.sh. Hours on two cores; it may be stopped, and goes on.
# The tables and their figure are OUTPUT/study/table.* (runs/small_study by default).
set -euo pipefail

data=$(realpath "${BERT_JAX_DATA:?set it to the folder of the corpora and tasks}")
out=${1:-runs/small_study}
shift || true
here=$(realpath "$(dirname "$0")")
corpus=("$data/corpus/enwiki/*.jsonl.gz" "$data/corpus/books/*.txt.gz")
export JAX_PLATFORMS=cpu
mkdir -p "$out/tasks"

[ -e "$out/vocab.txt" ] || bert-jax vocab --input "${corpus[@]}" --documents file --size 8192 --output "$out/vocab.txt"
for length in 32 128; do
  [ -e "$out/data$length/dataset.json" ] ||
    bert-jax prepare --input "${corpus[@]}" --documents file --vocab "$out/vocab.txt" --output "$out/data$length" \
      --seq_len $length
done
for task in glue squad wnut17 codah; do
  ln -sfn "$data/$task" "$out/tasks/$task"
done
[ -e "$out/tasks/korean/train.jsonl" ] ||
  python "$here/korean_pairs.py" "$data/corpus/kowiki/kowiki.jsonl.gz" "$out/tasks/korean"

bert-jax study "$here/small_study.py" --workdir="$out/study" --config.task_data="$out/tasks" \
  --config.pretraining.phases.0.data.path="$out/data32" --config.pretraining.phases.1.data.path="$out/data128" "$@"
