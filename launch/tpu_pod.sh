#!/usr/bin/env bash
# Runs one command on all hosts of a Cloud TPU slice, or of several, for as long as it takes: see usage() below.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/tpu_pod.sh VERB --name=NAME --zone=ZONE [OPTIONS] [-- COMMAND...]

  create   asks for the TPUs, as a queued resource
  setup    installs a git ref, with its `tpu` and `gcs` extras, on every host
  start    starts COMMAND on every host; it outlives the connection
  status   the queued resource, its nodes, and what every host is doing
  logs     the end of what the first host has written; --follow goes on
  stop     SIGTERM to the command on every host, which saves; `start` or `watch` goes on from there
  delete   gives the TPUs back
  watch    all of it, unattended: creates, sets up, starts, and starts again after a preemption (the TPUs are deleted
           and asked for anew) or exit status 75. Its own exit status: 0 done, 2 input to be mended, 75 stopped by
           `stop`, 1 failed more than --max-failures times. It deletes the TPUs when it ends so, but for 75. It can be
           interrupted, and called again.

  --accelerator-type=TYPE   v6e-256, v5p-64, v5litepod-16, v4-32 ...
  --runtime-version=V       by default what goes with the type
  --node-count=N            slices (1)
  --spot                    may be preempted, and costs less
  --project=P               by default gcloud's own
  --repo=URL --ref=REF      what `setup` installs: by default this clone's origin and its commit, which has to be pushed
  --before='SHELL LINE'     on every host, before the installation: mounting what all hosts share, say
  --max-failures=N          how often `watch` tries again after another exit status than 0, 2 and 75 (3)
  --poll=SECONDS            how often `watch` looks (60)
  --keep                    `watch` deletes nothing when it ends
  --follow                  for `logs`
  --dry-run                 prints each gcloud command instead, quoted for a shell

COMMAND runs in the clone, with its environment active: bert-jax pretrain --config=... --workdir=... The workdir and the
dataset have to be on what all hosts share. Variables go before it: -- env NAME=VALUE bert-jax pretrain ...
USAGE
}

refuse() {
  printf 'launch/tpu_pod.sh: %s (--help says more)\n' "$*" >&2
  exit 2
}

say() { printf '%s tpu_pod: %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

quoted() { # words as a shell would want them typed
  local word words=''
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
    words+=" $word"
  done
  printf '%s' "${words# }"
}

# --- What was asked for ----------------------------------------------------------------------------------------------
verb=${1:-}
case $verb in
  create | setup | start | status | logs | stop | delete | watch) shift ;;
  -h | --help) usage && exit 0 ;;
  "") refuse "no verb: create, setup, start, status, logs, stop, delete or watch" ;;
  *) refuse "unknown verb $verb: create, setup, start, status, logs, stop, delete or watch" ;;
esac

name='' zone='' project='' accelerator='' runtime='' repo='' ref='' before=''
nodes=1 max_failures=3 poll=60 spot='' keep='' follow='' dry_run=''
while [ $# -gt 0 ]; do
  case $1 in
    --) shift && break ;;
    -h | --help) usage && exit 0 ;;
    --spot) spot=yes && shift && continue ;;
    --keep) keep=yes && shift && continue ;;
    --follow) follow=yes && shift && continue ;;
    --dry-run) dry_run=yes && shift && continue ;;
    --*=*) option=${1%%=*} value=${1#*=} && shift ;;
    --*)
      [ $# -ge 2 ] || refuse "$1 wants a value"
      option=$1 value=$2 && shift 2
      ;;
    *) refuse "$1 is no option; the command comes after --" ;;
  esac
  [ -n "$value" ] || refuse "$option wants a value"
  case $option in
    --name) name=$value ;;
    --zone) zone=$value ;;
    --project) project=$value ;;
    --accelerator-type) accelerator=$value ;;
    --runtime-version) runtime=$value ;;
    --node-count) nodes=$value ;;
    --repo) repo=$value ;;
    --ref) ref=$value ;;
    --before) before=$value ;;
    --max-failures) max_failures=$value ;;
    --poll) poll=$value ;;
    *) refuse "unknown option $option" ;;
  esac
done
command=("$@")

[ -n "$name" ] || refuse "--name is missing"
[ -n "$zone" ] || refuse "--zone is missing"
[[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || refuse "--name=$name: lower-case letters, digits and hyphens"
for number in "$nodes" "$max_failures" "$poll"; do
  [[ $number =~ ^[0-9]+$ ]] || refuse "$number has to be a whole number"
done
[ "$nodes" -ge 1 ] || refuse "--node-count=$nodes: one slice at the least"
case $verb in create | watch) [ -n "$accelerator" ] || refuse "--accelerator-type is missing" ;; esac
case $verb in start | watch) [ ${#command[@]} -gt 0 ] || refuse "no command: put it after --" ;; esac
if [ -n "$accelerator" ] && [ -z "$runtime" ]; then
  case $accelerator in # cloud.google.com/tpu/docs/runtimes
    v6e-*) runtime=v2-alpha-tpuv6e ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    v4-*) runtime=tpu-ubuntu2204-base ;;
    *) refuse "no runtime known for $accelerator: give --runtime-version (TPU7x is had by GKE alone)" ;;
  esac
fi
case $verb in
  setup | watch)
    here=$(dirname "${BASH_SOURCE[0]}")
    [ -n "$repo" ] || repo=$(git -C "$here" remote get-url origin 2>/dev/null) || refuse "no origin here: give --repo"
    [ -n "$ref" ] || ref=$(git -C "$here" rev-parse HEAD 2>/dev/null) || refuse "no commit here: give --ref"
    ;;
esac
[ -n "$dry_run" ] || command -v gcloud >/dev/null || refuse "gcloud is not installed: cloud.google.com/sdk"

# --- gcloud ----------------------------------------------------------------------------------------------------------
where=("--zone=$zone")
[ -z "$project" ] || where+=("--project=$project")

cloud() {
  if [ -n "$dry_run" ]; then
    quoted gcloud "$@"
    printf '\n'
  else
    gcloud "$@"
  fi
}

create() {
  local shape=("--node-id=$name")
  [ "$nodes" = 1 ] || shape=("--node-count=$nodes" "--node-prefix=$name")
  cloud compute tpus queued-resources create "$name" "${where[@]}" "--accelerator-type=$accelerator" \
    "--runtime-version=$runtime" "${shape[@]}" ${spot:+--spot} --quiet
}

delete() { cloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet; }

node_states() {
  local number
  if [ "$nodes" = 1 ]; then
    cloud compute tpus tpu-vm describe "$name" "${where[@]}" '--format=value(state)'
    return
  fi
  for ((number = 0; number < nodes; number++)); do
    cloud compute tpus tpu-vm describe "$name-$number" "${where[@]}" '--format=value(state)'
  done
}

on_hosts() { # all of them, or `first`
  local which=all
  [ "$1" = all ] || which=0
  cloud compute tpus queued-resources ssh "$name" "${where[@]}" "--node=$which" "--worker=$which" --quiet "--command=$2"
}

# --- What runs on a host: single lines, for a remote shell ------------------------------------------------------------
# A run's folder there holds `ready` (the ref that is installed), `pid`, `status` (once it has ended), `stopped`, `log`.
run="\$HOME/bert_jax_runs/$name"
# shellcheck disable=SC2016
tell='echo "tpu_pod $(hostname)'

setup() {
  local line
  line="set -e; mkdir -p $run; rm -f $run/ready"
  [ -z "$before" ] || line+="; bash -c $(quoted "$before")"
  # The images' own Python may be older than 3.11; uv brings one along.
  line+="; python3 -m pip install --quiet --user uv"
  line+="; [ -d \$HOME/bert_jax ] || git clone --quiet $(quoted "$repo") \$HOME/bert_jax"
  line+="; cd \$HOME/bert_jax; git fetch --quiet origin; git checkout --quiet --detach $(quoted "$ref")"
  line+="; [ -d .venv ] || \$HOME/.local/bin/uv venv --quiet --python 3.12 .venv"
  line+="; \$HOME/.local/bin/uv pip install --quiet --python .venv/bin/python '.[tpu,gcs]'"
  line+="; echo $(quoted "$ref") > $run/ready; $tell ready\""
  on_hosts all "$line"
}

start() {
  # shellcheck disable=SC2016
  local keeper='"${@:2}"; echo $? > "$1/ended"; mv "$1/ended" "$1/status"'
  local line="mkdir -p $run; cd \$HOME/bert_jax && if [ -e $run/pid ] && [ ! -e $run/status ]"
  line+=" && kill -0 \$(cat $run/pid) 2>/dev/null; then $tell running\"; else rm -f $run/status $run/stopped"
  line+="; export PATH=\$HOME/bert_jax/.venv/bin:\$PATH"
  line+="; setsid nohup bash -c $(quoted "$keeper") tpu_pod $run $(quoted "${command[@]}")"
  line+=" </dev/null >>$run/log 2>&1 & echo \$! > $run/pid; $tell started\"; fi"
  on_hosts all "$line"
}

host_states() { # lines: tpu_pod HOST running | bare | stopped | exited N | lost | idle
  local installed="-e $run/ready"
  [ -z "$ref" ] || installed="\"\$(cat $run/ready 2>/dev/null)\" = $(quoted "$ref")"
  local line="if [ -e $run/pid ] && [ ! -e $run/status ] && kill -0 \$(cat $run/pid) 2>/dev/null; then $tell running\""
  line+="; elif ! [ $installed ]; then $tell bare\""
  line+="; elif [ -e $run/status ] && [ -e $run/stopped ]; then $tell stopped\""
  line+="; elif [ -e $run/status ]; then $tell exited \$(cat $run/status)\""
  line+="; elif [ -e $run/pid ]; then $tell lost\"; else $tell idle\"; fi"
  on_hosts all "$line"
}

stop() { on_hosts all "touch $run/stopped; pkill -TERM -P \$(cat $run/pid) && $tell told to stop\""; }

logs() { on_hosts first "tail -n 100 ${follow:+-F} $run/log"; }

# --- watch -----------------------------------------------------------------------------------------------------------
failures=0 silent=0
set_up='' started='' # on the TPUs that there are
mine=''              # whether what the hosts say is of a command that runs, or was started, since the watch began

resource_state() { # its state; ABSENT; or UNKNOWN, where gcloud gave no answer
  local errors
  errors=$(mktemp)
  if gcloud compute tpus queued-resources describe "$name" "${where[@]}" '--format=value(state.state)' 2>"$errors"; then
    :
  elif grep -Eq 'NOT_FOUND|not found' "$errors"; then
    echo ABSENT
  else
    cat "$errors" >&2
    echo UNKNOWN
  fi
  rm -f "$errors"
}

end() { # EXIT_STATUS WHY
  say "$2"
  [ "$1" = 0 ] || logs || true
  if [ "$1" != 75 ] && [ -z "$keep" ] && [ "$(resource_state)" != ABSENT ]; then
    delete || say "could not be deleted, and costs money: tpu_pod.sh delete $(quoted "--name=$name" "${where[@]}")"
  fi
  exit "$1"
}

failed() { # WHY; ends the watch where it was once too often
  failures=$((failures + 1))
  say "$1: failure $failures, of which $max_failures are tried again"
  [ "$failures" -le "$max_failures" ] || end 1 "failed too often"
}

give_back() {
  set_up='' started=''
  delete || say "could not be deleted yet"
}

launch() {
  mine=yes started=yes
  say "starting"
  start || say "not all hosts could be reached"
}

# While one host runs there is nothing to do: with a process lost the others end by themselves. After that the worst
# that a host says decides.
decide() {
  local states=$1
  if grep -q ' running$' <<<"$states"; then
    mine=yes
  elif grep -q ' bare$' <<<"$states"; then
    [ -z "$set_up" ] || failed "the installation failed"
    set_up=yes
    say "setting up $ref"
    setup || true
  elif [ -z "$mine" ]; then
    launch
  elif grep -q ' exited 2$' <<<"$states"; then
    end 2 "exit status 2: the input has to be mended"
  elif grep -q ' stopped$' <<<"$states"; then
    end 75 "stopped; the TPUs are kept: watch goes on, delete gives them back"
  elif grep -Eqv ' (idle|exited 0|exited 75)$' <<<"$states"; then
    failed "a process failed or was lost: $(tr '\n' ';' <<<"$states")"
    launch
  elif grep -q ' idle$' <<<"$states"; then
    [ -z "$started" ] || failed "the command did not start everywhere"
    launch
  elif grep -q ' exited 75$' <<<"$states"; then
    launch
  else
    end 0 "done"
  fi
}

look_at_hosts() {
  local states
  if [[ $(node_states 2>/dev/null) == *PREEMPTED* ]]; then
    say "a node was preempted: asking anew"
    give_back
  elif states=$(host_states) && states=$(grep '^tpu_pod ' <<<"$states"); then
    silent=0
    decide "$states"
  else
    silent=$((silent + 1))
    say "no answer from all hosts ($silent)"
    if [ "$silent" -ge 20 ]; then
      silent=0
      failed "the hosts do not answer: asking anew"
      give_back
    fi
  fi
}

watch() {
  if [ -n "$dry_run" ]; then
    echo "# 1. ask for the TPUs, and look until they are ACTIVE"
    create
    cloud compute tpus queued-resources describe "$name" "${where[@]}" '--format=value(state.state)'
    echo "# 2. install, and start"
    setup
    start
    echo "# 3. look every $poll seconds; start again after 75, and $max_failures times after a failure"
    node_states
    host_states
    echo "# 4. after a preemption: give back, and from 1; at the end: give back"
    delete
    return
  fi
  local state last=''
  while :; do
    state=$(resource_state)
    [ "$state" = "$last" ] || say "$name is $state"
    last=$state
    case $state in
      ABSENT) create || failed "the TPUs could not be asked for" ;;
      ACTIVE) look_at_hosts ;;
      SUSPENDED)
        say "preempted: asking anew"
        give_back
        ;;
      FAILED)
        failed "the request for TPUs failed"
        give_back
        ;;
    esac
    sleep "$poll"
  done
}

case $verb in
  status)
    cloud compute tpus queued-resources describe "$name" "${where[@]}" '--format=value(state.state)'
    node_states
    host_states
    ;;
  *) "$verb" ;;
esac
