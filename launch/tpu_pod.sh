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
           `stop` or --max-hours, 1 failed more than --max-failures times. It deletes the TPUs when it ends, except
           after `stop`. It can be interrupted, and called again.

  --accelerator-type=TYPE   v6e-256, v5p-64, v5litepod-16, v4-32 ...
  --runtime-version=V       by default what goes with the type
  --node-count=N            slices (1)
  --spot                    may be preempted, and costs less
  --project=P               by default gcloud's own
  --repo=URL --ref=REF      what `setup` installs: by default this clone's origin and its commit, which has to be pushed
  --before='SHELL LINE'     on every host, before the installation: mounting what all hosts share, say
  --max-failures=N          how often `watch` tries again after another exit status than 0, 2 and 75 (3)
  --max-hours=H             after H hours `watch` stops the command, which saves, deletes the TPUs and ends with 75;
                            2.5 is two and a half; by default there is no limit. A second `watch` begins from 0
  --poll=SECONDS            how often `watch` looks (60); calls that fail are repeated ever more slowly
  --keep                    `watch` deletes nothing when it ends
  --compile                 compiles the step for the TPUs first, to see that it fits; needs libtpu here
  --no-check                asks for TPUs whatever the checks would say
  --follow                  for `logs`
  --dry-run                 prints each gcloud command instead, quoted for a shell

Before `create` and `watch` ask for TPUs, and before `setup` and `start`, launch/tpu_checks.py checks what they use: the
accelerator's name, that the commit can be cloned, the bert-jax command with its config, and its buckets. What is wrong
is one line, with exit status 2.

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
nodes=1 max_failures=3 max_hours='' poll=60 spot='' keep='' follow='' dry_run='' compile='' no_check=''
while [ $# -gt 0 ]; do
  case $1 in
    --) shift && break ;;
    -h | --help) usage && exit 0 ;;
    --spot) spot=yes && shift && continue ;;
    --keep) keep=yes && shift && continue ;;
    --follow) follow=yes && shift && continue ;;
    --dry-run) dry_run=yes && shift && continue ;;
    --compile) compile=yes && shift && continue ;;
    --no-check) no_check=yes && shift && continue ;;
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
    --max-hours) max_hours=$value ;;
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
[ "$poll" -ge 1 ] || refuse "--poll=$poll: one second at the least"
limit='' # seconds
if [ -n "$max_hours" ]; then
  [[ $max_hours =~ ^([0-9]{1,6})(\.([0-9]{1,4}))?$ ]] || refuse "--max-hours=$max_hours: a number of hours, as in 2.5"
  fraction=${BASH_REMATCH[3]:-}0000
  limit=$((10#${BASH_REMATCH[1]} * 3600 + 10#${fraction:0:4} * 3600 / 10000))
  [ "$limit" -ge 1 ] || refuse "--max-hours=$max_hours: above 0"
  [ -z "$keep" ] || refuse "--max-hours deletes the TPUs, and --keep keeps them: choose one"
fi
case $verb in create | watch) [ -n "$accelerator" ] || refuse "--accelerator-type is missing" ;; esac
case $verb in start | watch) [ ${#command[@]} -gt 0 ] || refuse "no command: put it after --" ;; esac
if [ -n "$accelerator" ] && [ -z "$runtime" ]; then
  case $accelerator in # cloud.google.com/tpu/docs/runtimes
    v6e-*) runtime=v2-alpha-tpuv6e ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    v2-* | v3-* | v4-*) runtime=tpu-ubuntu2204-base ;;
  esac
fi
here=${BASH_SOURCE[0]%/*}
[ "$here" != "${BASH_SOURCE[0]}" ] || here=.
checks=()
[ -z "$accelerator" ] || checks+=("--accelerator-type=$accelerator" "--node-count=$nodes")
case $verb in
  setup | watch)
    [ -n "$repo" ] || repo=$(git -C "$here" remote get-url origin 2>/dev/null) || refuse "no origin here: give --repo"
    checks+=("--repo=$repo" "--ref=$ref")
    [ -n "$ref" ] || ref=$(git -C "$here" rev-parse HEAD 2>/dev/null) || refuse "no commit here: give --ref"
    ;;
esac
[ -n "$dry_run" ] || command -v gcloud >/dev/null || refuse "gcloud is not installed: cloud.google.com/sdk"
if [ -z "$no_check" ]; then
  case $verb in
    create | setup | start | watch)
      for python in "${VIRTUAL_ENV:-}/bin/python" "$here/../.venv/bin/python" "$(command -v python3)"; do
        [ ! -x "$python" ] || break
      done
      [ -x "$python" ] || refuse "python3 is not installed: it checks what is asked for (--no-check does without)"
      commit=$("$python" "$here/tpu_checks.py" "${checks[@]}" ${compile:+--compile} ${dry_run:+--dry-run} \
        -- "${command[@]}") || exit $?
      ref=${commit:-$ref}
      ;;
  esac
fi
if [ -n "$accelerator" ] && [ -z "$runtime" ]; then
  refuse "no runtime known for $accelerator: give --runtime-version"
fi

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
  # A host that is gone while it is asked is noticed after two minutes.
  cloud compute tpus queued-resources ssh "$name" "${where[@]}" "--node=$which" "--worker=$which" --quiet \
    --ssh-flag=-oConnectTimeout=30 --ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oServerAliveCountMax=4 "--command=$2"
}

# --- What runs on a host: single lines, for a remote shell ------------------------------------------------------------
# A run's folder there holds `ready` (the ref that is installed), `pid` (the command's), `status` (once it has ended),
# `stopped`, `log`, and `lock`, which the process that waits for the command holds: a process id that is used again is
# nobody's lock.
run="\$HOME/bert_jax_runs/$name"
# shellcheck disable=SC2016
tell='echo "tpu_pod $(hostname)'
is_running="[ -e $run/lock ] && ! flock --shared --nonblock $run/lock true"

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
  on_hosts all "timeout --kill-after=10 3600 bash -c $(quoted "$line")"
}

start() {
  # shellcheck disable=SC2016
  local keeper='(exec 9>&-; echo "$BASHPID" > "$1/pid"; exec "${@:2}"); echo $? > "$1/ended"; mv "$1/ended" "$1/status"'
  local line="mkdir -p $run; cd \$HOME/bert_jax && exec 9>>$run/lock && if ! flock --wait 1 9; then $tell running\""
  line+="; else rm -f $run/status $run/stopped $run/pid; export PATH=\$HOME/bert_jax/.venv/bin:\$PATH"
  line+="; setsid nohup bash -c $(quoted "$keeper") tpu_pod $run $(quoted "${command[@]}")"
  line+=" </dev/null >>$run/log 2>&1 & exec 9>&-; $tell started\"; fi"
  on_hosts all "$line"
}

host_states() { # lines: tpu_pod HOST running | bare | stopped | exited N | lost | idle
  local installed="-e $run/ready"
  [ -z "$ref" ] || installed="\"\$(cat $run/ready 2>/dev/null)\" = $(quoted "$ref")"
  local line="if $is_running; then $tell running\""
  line+="; elif ! [ $installed ]; then $tell bare\""
  line+="; elif [ -e $run/status ] && [ -e $run/stopped ]; then $tell stopped\""
  line+="; elif [ -e $run/status ]; then $tell exited \$(cat $run/status)\""
  line+="; elif [ -e $run/pid ]; then $tell lost\"; else $tell idle\"; fi"
  on_hosts all "$line"
}

stop() {
  local line="touch $run/stopped; if $is_running; then [ -s $run/pid ] || sleep 2"
  line+="; kill -TERM \$(cat $run/pid) && $tell told to stop\"; else $tell not running\"; false; fi"
  on_hosts all "$line"
}

logs() { on_hosts first "tail -n 100 ${follow:+-F} $run/log"; }

# --- watch -----------------------------------------------------------------------------------------------------------
failures=0 silent=0
troubles=0 trouble='' # looks in a row, and whether this one, at which gcloud has failed
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

began=$(date +%s)

elapsed() { echo $(($(date +%s) - began)); }

pause() { # SECONDS, which in tests are of TPU_POD_SECOND_MS milliseconds
  local milliseconds=$(($1 * ${TPU_POD_SECOND_MS:-1000}))
  sleep "$((milliseconds / 1000)).$(printf %03d $((milliseconds % 1000)))"
}

wait_a_while() { # longer after each look in a row at which gcloud has failed; never past the limit
  local seconds=$poll longest=$((poll > 600 ? poll : 600)) left
  for ((left = troubles; left > 0 && seconds < longest; left--)); do seconds=$((seconds * 2)); done
  seconds=$((seconds < longest ? seconds : longest))
  if [ -n "$limit" ]; then
    left=$((limit - $(elapsed)))
    seconds=$((seconds < left ? seconds : left > 0 ? left : 0))
  fi
  pause "$seconds"
}

give_back_for_good() {
  local try
  [ "$(resource_state)" != ABSENT ] || return 0
  for try in 1 2 3 4 5; do
    ! delete || return 0
    pause $((try * 10))
  done
  say "could not be deleted, and costs money: tpu_pod.sh delete $(quoted "--name=$name" "${where[@]}")"
}

end() { # EXIT_STATUS WHY [kept]
  say "$2"
  [ "$1" = 0 ] || logs || true
  [ -n "${3:-}" ] || [ -n "$keep" ] || give_back_for_good
  exit "$1"
}

end_in_time() { # once --max-hours have passed: the command has five minutes to save in
  local until=$(($(elapsed) + 300))
  say "--max-hours=$max_hours have passed: the command is told to save"
  if [ "$(resource_state)" = ACTIVE ] && stop; then
    while [ "$(elapsed)" -lt "$until" ] && grep -q ' running$' <<<"$(host_states)"; do pause 5; done
  fi
  end 75 "--max-hours=$max_hours have passed; watch goes on from what is saved"
}

failed() { # WHY; ends the watch where it was once too often
  failures=$((failures + 1))
  say "$1: failure $failures, of which $max_failures are tried again"
  [ "$failures" -le "$max_failures" ] || end 1 "failed too often"
}

give_back() {
  set_up='' started=''
  delete || {
    trouble=yes
    say "could not be deleted yet"
  }
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
    end 75 "stopped; the TPUs are kept: watch goes on, delete gives them back" kept
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
    [ -z "$limit" ] || [ "$(elapsed)" -lt "$limit" ] || end_in_time
    state=$(resource_state)
    trouble=''
    [ "$state" = "$last" ] || say "$name is $state"
    last=$state
    case $state in
      UNKNOWN) trouble=yes ;;
      ABSENT)
        create || {
          trouble=yes
          failed "the TPUs could not be asked for"
        }
        ;;
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
    [ -n "$trouble" ] && troubles=$((troubles + 1)) || troubles=0
    wait_a_while
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
