#!/usr/bin/env bash
# Fills in launch/gke_jobset.yaml, and prints it; --apply hands it to kubectl instead.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: NAME=... IMAGE=... CLAIM=... ACCELERATOR=... TOPOLOGY=... [...] launch/gke_jobset.sh [--apply] -- COMMAND...

  NAME             the JobSet's
  IMAGE            a container image with bert_jax and its `tpu` extra
  CLAIM            a PersistentVolumeClaim, ReadWriteMany, mounted at /shared: the workdir and the dataset lie there
  ACCELERATOR      tpu-v4-podslice, tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice, tpu7x
  TOPOLOGY         the slice's: 4x4, 2x2x4 ...
  CHIPS_PER_HOST   of the node pool's machines (4)
  SLICES           node pools of that kind, one a slice (1)
  SPOT             yes or no (yes): only nodes of spot pools
  MAX_FAILURES     restarts after another exit status than 0, 2 and 75 (3)

  NAME=bert IMAGE=europe-west4-docker.pkg.dev/P/R/bert-jax:v1 CLAIM=runs ACCELERATOR=tpu-v6e-slice TOPOLOGY=16x16 \
    launch/gke_jobset.sh -- bert-jax pretrain --config=bert_base --workdir=/shared/run --config.data.path=/shared/data
USAGE
}

refuse() {
  printf 'launch/gke_jobset.sh: %s (--help says more)\n' "$*" >&2
  exit 2
}

apply=
while [ $# -gt 0 ]; do
  case $1 in
    --) shift && break ;;
    --apply) apply=yes && shift ;;
    -h | --help) usage && exit 0 ;;
    *) refuse "$1 is no option; the command comes after --" ;;
  esac
done
[ $# -gt 0 ] || refuse "no command: put it after --"

: "${CHIPS_PER_HOST:=4}" "${SLICES:=1}" "${SPOT:=yes}" "${MAX_FAILURES:=3}"
for variable in NAME IMAGE CLAIM ACCELERATOR TOPOLOGY; do
  [ -n "${!variable:-}" ] || refuse "$variable is not set"
  [[ ${!variable} =~ ^[A-Za-z0-9][A-Za-z0-9._/:@-]*$ ]] || refuse "$variable=${!variable} cannot be that"
done
for variable in CHIPS_PER_HOST SLICES MAX_FAILURES; do
  [[ ${!variable} =~ ^(0|[1-9][0-9]*)$ ]] || refuse "$variable=${!variable} has to be a whole number"
done
[[ $NAME =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || refuse "NAME=$NAME: lower-case letters, digits and hyphens"
[[ $TOPOLOGY =~ ^[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]] || refuse "TOPOLOGY=$TOPOLOGY: 4x4 or 2x2x4, say"
case $SPOT in yes | no) ;; *) refuse "SPOT=$SPOT: yes or no" ;; esac
for variable in SLICES CHIPS_PER_HOST; do
  [ "${!variable}" -ge 1 ] || refuse "$variable=${!variable}: 1 at the least"
done
chips=$((${TOPOLOGY//x/*}))
[ $((chips % CHIPS_PER_HOST)) = 0 ] ||
  refuse "$TOPOLOGY has $chips chips: no multiple of CHIPS_PER_HOST=$CHIPS_PER_HOST"
# shellcheck disable=SC2034  # read by its name
HOSTS=$((chips / CHIPS_PER_HOST))

COMMAND='' # as YAML and JSON write lists of strings
for word in "$@"; do
  [[ $word != *[[:cntrl:]]* ]] || refuse "no control characters in a command"
  word=${word//\\/\\\\}
  word=${word//\"/\\\"}
  word=${word//\$\(/\$\$(} # which Kubernetes would fill in by itself
  COMMAND+="${COMMAND:+, }\"$word\""
done
COMMAND="[$COMMAND]"

render() {
  local line variable
  while IFS= read -r line; do
    [ "$SPOT" = yes ] || [[ $line != *gke-spot* ]] || continue
    [[ $line != '#'* ]] || continue
    for variable in NAME IMAGE CLAIM ACCELERATOR TOPOLOGY CHIPS_PER_HOST SLICES MAX_FAILURES HOSTS COMMAND; do
      if [[ $line == *"\${$variable}"* ]]; then # COMMAND is the last: what is in it stays as it is
        line=${line%%"\${$variable}"*}${!variable}${line#*"\${$variable}"}
      fi
    done
    printf '%s\n' "$line"
  done <"$(dirname "${BASH_SOURCE[0]}")/gke_jobset.yaml"
}

if [ -z "$apply" ]; then
  render
else
  command -v kubectl >/dev/null || refuse "kubectl is not installed"
  render | kubectl apply --filename=-
fi
