#!/usr/bin/env bash
# Makes the folder of tasks of small_study.sh and modernbert_ladder.py, unless it already exists.
#
#   benchmarks/prepare_tasks.sh DATA OUTPUT
#
# DATA holds glue/, squad/, wnut17/, codah/ and corpus/kowiki/kowiki.jsonl.gz. Writes OUTPUT/tasks, with links into DATA.
set -euo pipefail

data=$(realpath "$1")
out=$2
here=$(realpath "$(dirname "$0")")
mkdir -p "$out/tasks/few" "$out/tasks/codah"

for task in glue squad wnut17; do
  ln -sfn "$data/$task" "$out/tasks/$task"
done
for split in train dev; do
  { printf 'category\tcontext\tending0\tending1\tending2\tending3\tlabel\n' && cat "$data/codah/$split.tsv"; } \
    >"$out/tasks/codah/$split.tsv"
done
ln -sf "$data/glue/SST-2/dev.tsv" "$out/tasks/few/dev.tsv"
[ -e "$out/tasks/few/train.tsv" ] || head -n 2001 "$data/glue/SST-2/train.tsv" >"$out/tasks/few/train.tsv"
[ -e "$out/tasks/korean/train.jsonl" ] ||
  python "$here/korean_pairs.py" "$data/corpus/kowiki/kowiki.jsonl.gz" "$out/tasks/korean"
