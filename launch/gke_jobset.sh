#!/usr/bin/env bash
# Fills in launch/gke_jobset.yaml and prints it; --apply passes it to kubectl instead.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: NAME=... IMAGE=... CLAIM=... ACCELERATOR=... TOPOLOGY=... [...] launch/gke_jobset.sh [--apply] -- COMMAND...

  NAME             name of the JobSet
  IMAGE            container image with bert_jax and its `tpu` extra, as of docker/tpu.Dockerfile
  CLAIM            PersistentVolumeClaim, ReadWriteMany, mounted at /shared; it holds the workdir and the dataset
  ACCELERATOR      tpu-v4-podslice, tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice, tpu7x
  TOPOLOGY         topology of a slice: 4x4, 2x2x4 ...
  CHIPS_PER_HOST   chips of each machine in the node pool (4)
  SLICES           number of slices, with one node pool each (1)
  SPOT             yes or no (yes): use only nodes of spot pools
  MAX_FAILURES     restarts after an exit status other than 0, 2 and 75 (3)

  NAME=bert IMAGE=europe-west4-docker.pkg.dev/P/R/bert-jax:v1 CLAIM=runs ACCELERATOR=tpu-v6e-slice TOPOLOGY=16x16 \
    launch/gke_jobset.sh -- bert-jax pretrain --config=bert_base --workdir=/shared/run --config.data.path=/shared/data
USAGE
}

refuse() {
  printf 'launch/gke_jobset.sh: %s; see --help\n' "$*" >&2
  exit 2
}

apply=
while [ $# -gt 0 ]; do
  case $1 in
    --) shift && break ;;
    --apply) apply=yes && shift ;;
    -h | --help) usage && exit 0 ;;
    *) refuse "$1: unknown option; put the command after --" ;;
  esac
done
[ $# -gt 0 ] || refuse "no command given; put it after --, as in -- bert-jax pretrain ..."

: "${CHIPS_PER_HOST:=4}" "${SLICES:=1}" "${SPOT:=yes}" "${MAX_FAILURES:=3}"
for variable in NAME IMAGE CLAIM ACCELERATOR TOPOLOGY; do
  [ -n "${!variable:-}" ] || refuse "$variable is not set; it is required"
  [[ ${!variable} =~ ^[A-Za-z0-9][A-Za-z0-9._/:@-]*$ ]] ||
    refuse "$variable=${!variable}: invalid character; expected letters, digits and . _ / : @ -"
done
for variable in CHIPS_PER_HOST SLICES MAX_FAILURES; do
  [[ ${!variable} =~ ^(0|[1-9][0-9]*)$ ]] || refuse "$variable=${!variable}: expected a whole number"
done
[[ $NAME =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] || # the names of pods are up to 22 longer, and end at 63
  refuse "NAME=$NAME: invalid name; expected up to 40 lower-case letters, digits and hyphens, as in bert-1"
case $ACCELERATOR in
  tpu-v5-lite-podslice | tpu-v6e-slice) sizes='two sizes, as in 4x4' more=1 ;;
  tpu-v4-podslice | tpu-v5p-slice | tpu7x) sizes='three sizes, as in 2x2x4' more=2 ;;
  *) refuse "ACCELERATOR=$ACCELERATOR: unknown; expected tpu-v4-podslice, tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice or tpu7x" ;;
esac
[[ $TOPOLOGY =~ ^[1-9][0-9]*(x[1-9][0-9]*){$more}$ ]] ||
  refuse "TOPOLOGY=$TOPOLOGY: invalid topology of $ACCELERATOR; expected $sizes"
case $SPOT in yes | no) ;; *) refuse "SPOT=$SPOT: expected yes or no" ;; esac
for variable in SLICES CHIPS_PER_HOST; do
  [ "${!variable}" -ge 1 ] || refuse "$variable=${!variable}: expected at least 1"
done
chips=$((${TOPOLOGY//x/*}))
[ $((chips % CHIPS_PER_HOST)) = 0 ] ||
  refuse "TOPOLOGY=$TOPOLOGY: $chips chips are not divisible by CHIPS_PER_HOST=$CHIPS_PER_HOST"
# shellcheck disable=SC2034  # `render` reads it by its name
HOSTS=$((chips / CHIPS_PER_HOST))

COMMAND='' # a list of strings, in the syntax that YAML and JSON share
for word in "$@"; do
  [[ $word != *[[:cntrl:]]* ]] || refuse "COMMAND: a word contains a control character; remove it"
  word=${word//\\/\\\\}
  word=${word//\"/\\\"}
  word=${word//\$\(/\$\$(} # Kubernetes would expand $(NAME); $$(NAME) escapes it
  COMMAND+="${COMMAND:+, }\"$word\""
done
COMMAND="[$COMMAND]"

render() {
  local line variable
  while IFS= read -r line; do
    [ "$SPOT" = yes ] || [[ $line != *gke-spot* ]] || continue
    [[ $line != '#'* ]] || continue
    for variable in NAME IMAGE CLAIM ACCELERATOR TOPOLOGY CHIPS_PER_HOST SLICES MAX_FAILURES HOSTS COMMAND; do
      if [[ $line == *"\${$variable}"* ]]; then # COMMAND is last, so that ${NAME} in it is not expanded
        line=${line%%"\${$variable}"*}${!variable}${line#*"\${$variable}"}
      fi
    done
    printf '%s\n' "$line"
  done <"$(dirname "${BASH_SOURCE[0]}")/gke_jobset.yaml"
}

if [ -z "$apply" ]; then
  render
else
  command -v kubectl >/dev/null || refuse "kubectl not found; install it, or omit --apply to print the manifest"
  render | kubectl apply --filename=-
fi
