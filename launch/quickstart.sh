#!/usr/bin/env bash
# Makes a trained, exported BERT from raw text, and shows what it learned: less than five minutes on two CPU cores.
#
#   launch/quickstart.sh [FOLDER [--config.KEY=VALUE ...]]      (or `make quickstart`, which installs first)
#
# The text is the English that Python and the installed packages carry, so nothing is downloaded. TEXT='FILE ...' is
# other text. A second call makes again what is older than its input, and resumes training where the first call stopped.
# The exit status is 1 if the model learned little more than the frequencies of words.
set -euo pipefail

usage="usage: launch/quickstart.sh [FOLDER [--config.KEY=VALUE ...]]   (other text: TEXT='FILE ...')"
case ${1:-} in
  -h | --help) echo "$usage" && exit 0 ;;
  -*) echo "launch/quickstart.sh: $1: expected a folder first; $usage" >&2 && exit 2 ;;
esac
out=${1:-quickstart}
shift || true
# shellcheck disable=SC2206 # words and patterns
text=(${TEXT:-})
least=1.0 # nats under the unigram baseline; runs that have learned no word order stay some 0.7 under it
mkdir -p "$out"
bin=$(dirname "$(command -v bert-jax)")
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}

step() { printf '\n== %s\n' "$*"; }
is_current() { # OUTPUT INPUT...: the output exists and no input is newer
  [ -e "$1" ] && [ -z "$(find "${@:2}" -newer "$1" -print -quit 2>/dev/null)" ] && echo "$1 already exists"
}

step "1/6  text, and a vocabulary of 2,048 word pieces"
if [ ${#text[@]} -eq 0 ]; then
  text=("$out/text")
  [ -e "$out/text/matplotlib.txt" ] || "$bin/python" "$(dirname "$0")/python_docs.py" "$out/text" \
    python numpy scipy matplotlib
fi
inputs=$out/inputs # the names of the files: another one is newer than what was made of others
[ "$(cat "$inputs" 2>/dev/null)" = "${text[*]}" ] || echo "${text[*]}" > "$inputs"
is_current "$out/tokenizer.json" "$inputs" "${text[@]}" || {
  rm -f "$out/tokenizer.json"
  bert-jax vocab --input "${text[@]}" --size 2048 --output "$out/tokenizer.json"
}

step "2/6  dataset: sentence pairs of 32 tokens, 5% of the documents held out"
is_current "$out/data/dataset.json" "$out/tokenizer.json" "$inputs" "${text[@]}" || {
  rm -rf "$out/data"
  bert-jax prepare --input "${text[@]}" --vocab "$out/tokenizer.json" --output "$out/data" \
    --seq_len 32 --eval_fraction 0.05 --max_line_repeats 1 --workers 2
}

step "3/6  pre-training: masked words and next sentences"
bert-jax pretrain --config=quickstart --workdir="$out/run" --config.data.path="$out/data" "$@"

step "4/6  export for transformers"
is_current "$out/hf/model.safetensors" "$out/run/checkpoints" || {
  rm -rf "$out/hf"
  bert-jax export --checkpoint "$out/run" --output "$out/hf"
}

step "5/6  filled masks"
bert-jax fill-mask --checkpoint "$out/run" --top 3 \
  "Raises an [MASK] if the file does not exist." \
  "Return the number of [MASK] in the array." \
  "If None, the default [MASK] is used." \
  "Returns True if the two arrays have the same [MASK]."

step "6/6  evaluation on held-out documents"
bert-jax report "$out/run" --output "$out/report.html"
bert-jax evaluate --checkpoint "$out/run" --data "$out/data" > "$out/evaluation.json"
python3 - "$out" "$least" "$SECONDS" "${bin#"$PWD/"}" <<'PY'
import json
import shlex
import sys

out, least, seconds, bin = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), shlex.quote(sys.argv[4])
with open(f"{out}/evaluation.json") as file:
    values = json.load(file)
gain = values["unigram_loss"] - values["mlm_loss"]
rows = {
    "MLM loss": f"{values['mlm_loss']:.2f} nats",
    "loss of word frequencies": f"{values['unigram_loss']:.2f} nats, the unigram baseline",
    "difference": f"{gain:.2f} nats",
    "MLM accuracy": f"{values['mlm_accuracy']:.1%} of masked pieces",
    "NSP accuracy": f"{values['nsp_accuracy']:.1%} of pairs; 50% is chance",
    "time of this call": f"{seconds // 60} min {seconds % 60:02d} s",
}
print()
for name, value in rows.items():
    print(f"  {name:<26}{value}")
if gain < least:
    sys.exit(f"\n{out}/run: MLM loss: expected at least {least} nats under the baseline, got {gain:.2f}")
path = shlex.quote(out)
print(f"""
In {out}:
  run/ (checkpoints, metrics), hf/ (for transformers), report.html,
  tokenizer.json, data/, evaluation.json

Next: fill masks of your own, look at the data, train a larger model
  {bin}/bert-jax fill-mask --checkpoint {path}/run "The [MASK] is empty."
  {bin}/bert-jax inspect {path}/data
  {bin}/bert-jax pretrain --config=bert_mini --workdir={path}/mini \\
    --config.data.path={path}/data""")
PY
