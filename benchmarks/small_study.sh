#!/usr/bin/env bash
# Runs a study that fits on a laptop: BERT-Tiny pre-trained in three ways and untrained, on real tasks.
#
#   BERT_JAX_DATA=FOLDER benchmarks/small_study.sh [OUTPUT] [--config.KEY=VALUE ...]
#   BERT_JAX_DATA=FOLDER STUDY=modernbert_ladder benchmarks/small_study.sh runs/ladder
#
# The second line runs the study of benchmarks/modernbert_ladder.py: the steps from BERT to ModernBERT.
# FOLDER holds corpus/enwiki/*.jsonl.gz, corpus/books/*.txt.gz and corpus/kowiki/kowiki.jsonl.gz, glue/, squad/, wnut17/
# and codah/. Vocabulary and datasets are those of reference_cpu.sh. It takes hours on two cores. It may be stopped; the
# same command resumes it. The tables and their figure are OUTPUT/study/table.* (OUTPUT is runs/small_study by default).
set -euo pipefail

data=$(realpath "${BERT_JAX_DATA:?is not set; set it to the folder of the corpora and tasks}")
out=runs/small_study
if [[ "${1:-}" && "$1" != --* ]]; then
  out=$1
  shift
fi
here=$(realpath "$(dirname "$0")")
export JAX_PLATFORMS=cpu
mkdir -p "$out/tasks/few"

"$here/prepare_english.sh" "$data" "$out"
for task in glue squad wnut17; do
  ln -sfn "$data/$task" "$out/tasks/$task"
done
mkdir -p "$out/tasks/codah"
for split in train dev; do
  { printf 'category\tcontext\tending0\tending1\tending2\tending3\tlabel\n' && cat "$data/codah/$split.tsv"; } \
    >"$out/tasks/codah/$split.tsv"
done
ln -sf "$data/glue/SST-2/dev.tsv" "$out/tasks/few/dev.tsv"
[ -e "$out/tasks/few/train.tsv" ] || head -n 2001 "$data/glue/SST-2/train.tsv" >"$out/tasks/few/train.tsv"
[ -e "$out/tasks/korean/train.jsonl" ] ||
  python "$here/korean_pairs.py" "$data/corpus/kowiki/kowiki.jsonl.gz" "$out/tasks/korean"

bert-jax study "$here/${STUDY:-small_study}.py" --workdir="$out/study" --config.task_data="$out/tasks" \
  --config.pretraining.phases.0.data.path="$out/data32" --config.pretraining.phases.1.data.path="$out/data128" "$@"
