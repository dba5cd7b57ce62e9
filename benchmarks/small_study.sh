#!/usr/bin/env bash
# Runs a study that fits on a laptop: BERT-Tiny pre-trained in three ways and untrained, on real tasks.
#
#   BERT_JAX_DATA=FOLDER benchmarks/small_study.sh [OUTPUT] [--config.KEY=VALUE ...]
#
# FOLDER holds corpus/enwiki/*.jsonl.gz, corpus/books/*.txt.gz and corpus/kowiki/kowiki.jsonl.gz, glue/, squad/, wnut17/
# and codah/. Vocabulary and datasets are those of reference_cpu.sh. It takes hours on two cores. It may be stopped; the
# same command resumes it. The tables are OUTPUT/study/table.md and table.json (OUTPUT is runs/small_study by default).
set -euo pipefail

data=$(realpath "${BERT_JAX_DATA:?is not set; set it to the folder of the corpora and tasks}")
out=runs/small_study
if [[ "${1:-}" && "$1" != --* ]]; then
  out=$1
  shift
fi
here=$(realpath "$(dirname "$0")")
export JAX_PLATFORMS=cpu

"$here/prepare_english.sh" "$data" "$out"
"$here/prepare_tasks.sh" "$data" "$out"

bert-jax study "$here/small_study.py" --workdir="$out/study" --config.task_data="$out/tasks" \
  --config.pretraining.phases.0.data.path="$out/data32" --config.pretraining.phases.1.data.path="$out/data128" "$@"
