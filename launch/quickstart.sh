#!/usr/bin/env bash
# Makes a trained, exported BERT from raw text: vocabulary, dataset, pre-training, evaluation, export, filled masks.
#
#   launch/quickstart.sh [FOLDER]      (or `make quickstart`, which installs first)
#
# The text is the English that Python itself carries, so nothing is downloaded. It takes some minutes on two CPU cores.
# A second call reuses existing results and resumes where the first call stopped.
set -euo pipefail

out=${1:-quickstart}
mkdir -p "$out"
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}

step() { printf '\n== %s\n' "$*"; }

step "1/7  vocabulary: WordPiece, 8,192 pieces"
if [ -e "$out/vocab.txt" ]; then
  echo "$out/vocab.txt already exists"
else
  bert-jax vocab --input pydoc --size 8192 --output "$out/vocab.txt"
fi

step "2/7  dataset: sentence pairs of 128 tokens"
if [ -e "$out/data/dataset.json" ]; then
  echo "$out/data already exists"
else
  bert-jax prepare --input pydoc --vocab "$out/vocab.txt" --output "$out/data" --eval_fraction 0.03
fi

step "3/7  pre-training: BERT-Tiny, MLM and NSP together"
bert-jax pretrain --config=bert_tiny --workdir="$out/run" --config.data.path="$out/data" \
  --config.total_steps=1500 --config.optimizer.warmup_steps=150 \
  --config.eval_every_steps=250 --config.eval_batches=40 --config.checkpoint.every_steps=250

step "4/7  evaluation"
bert-jax evaluate --checkpoint "$out/run" --data "$out/data" | tee "$out/evaluation.json"
python - "$out/evaluation.json" <<'PY'
import json, sys
with open(sys.argv[1]) as file:
    values = json.load(file)
gain = values["unigram_loss"] - values["mlm_loss"]
print(f"MLM loss {values['mlm_loss']:.2f}, {gain:.2f} nats under the unigram baseline of {values['unigram_loss']:.2f}")
sys.exit("mlm_loss: expected less than unigram_loss; the model learned only word frequencies" if gain <= 0 else 0)
PY

step "5/7  export to Hugging Face's layout"
if [ -e "$out/hf/model.safetensors" ]; then
  echo "$out/hf already exists"
else
  bert-jax export --checkpoint "$out/run" --output "$out/hf"
fi

step "6/7  three filled masks"
bert-jax fill-mask --checkpoint "$out/run" --top 3 \
  "Return the [MASK] of the string." \
  "Raises an [MASK] if the file does not exist." \
  "This function is used to [MASK] the object."

step "7/7  curves"
bert-jax report "$out/run" --output "$out/curves.png"

cat <<EOF

Done. In $out:
  vocab.txt         the vocabulary
  data/             the prepared dataset
  run/              checkpoints, metrics.jsonl, TensorBoard events
  evaluation.json   MLM and NSP metrics on held-out documents, with the unigram baseline
  hf/               the model for transformers: BertForPreTraining.from_pretrained("$out/hf")
  curves.png        loss and accuracy curves
EOF
