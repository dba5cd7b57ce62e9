#!/usr/bin/env bash
# Runs everything that only a GPU can show, in ten minutes; a rerun continues. Installs nothing.
#
#   benchmarks/gpu.sh [--minutes 10] [--only PART,PART] [--json-folder FOLDER] [--data DATASET] [--rehearse]
#
# `benchmarks/gpu.sh --help` has the parts and all options. bert_jax need not be installed: a clone and jax with flax,
# optax, ml_collections and numpy run most parts. PYTHON is the interpreter, by default python3. Outside of a git clone,
# BERT_JAX_COMMIT is the commit that the results record.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
command -v "$python" > /dev/null || { echo "$python: not found; set PYTHON to Python 3.11 or later" >&2; exit 2; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "PYTHON=$python: expected Python 3.11 or later" >&2; exit 2; }

# Measures this clone, also where another bert_jax is installed. In a clone configs/ lies beside bert_jax/, or is linked
# into it.
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
mkdir "$package/bert_jax"
ln -s "$here"/../bert_jax/* "$package/bert_jax/"
ln -sfn "$here/../configs" "$package/bert_jax/configs"
export PYTHONPATH=$package${PYTHONPATH:+:$PYTHONPATH}
"$python" "$here/gpu.py" "$@"
