#!/usr/bin/env bash
# Runs one command on all hosts of one or several Cloud TPU slices until it is done: see usage() below.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/tpu_pod.sh VERB --name=NAME --zone=ZONE [OPTIONS] [-- COMMAND...]

  create   requests the TPUs as a queued resource
  setup    installs a git ref, with its `tpu` and `gcs` extras, on every host
  start    starts COMMAND on every host; it outlives the connection
  status   prints the state of the queued resource, of its nodes and of every host
  logs     prints the last 100 lines of the first host's log; with --follow, prints new lines as they arrive
  stop     sends SIGTERM to the command on every host, which saves; `start` or `watch` resumes it
  delete   deletes the TPUs
  watch    does all of it unattended: creates, sets up, starts, and restarts after a preemption (it deletes the TPUs and
           requests new ones) or exit status 75. Its own exit status: 0 done; 2 invalid input; 75 stopped by `stop` or
           --max-hours; 1 failed more than --max-failures times. It deletes the TPUs when it ends, except after `stop`.
           It can be interrupted and called again.

  --accelerator-type=TYPE   v6e-256, v5p-64, v5litepod-16, v4-32 ...
  --runtime-version=V       default: the version for the type
  --node-count=N            slices (1)
  --spot                    requests spot TPUs, which cost less and can be preempted
  --project=P               default: gcloud's own
  --repo=URL --ref=REF      repository and ref that `setup` installs; default: this clone's origin and its commit, which
                            must be pushed
  --before='SHELL LINE'     runs on every host before the installation, for example to mount a shared file system
  --max-failures=N          retries of `watch` after an exit status other than 0, 2 and 75 (3)
  --max-hours=H             after H hours `watch` stops the command, which saves, deletes the TPUs and exits with 75;
                            H can be a fraction, such as 2.5; default: no limit. A second `watch` counts from 0
  --poll=SECONDS            interval between checks of `watch` (60); failing calls are retried with backoff
  --keep                    makes `watch` keep the TPUs when it ends
  --compile                 first compiles the step for the TPUs, to check that it fits; requires libtpu here
  --no-check                requests TPUs without any checks
  --follow                  makes `logs` print new lines as they arrive
  --dry-run                 prints each gcloud command, quoted for a shell, and runs none

Before `create`, `watch`, `setup` and `start` act, launch/tpu_checks.py checks what they use: the name of the
accelerator, that the commit can be cloned, the bert-jax command with its config, and its buckets. It reports an error
in one line, with exit status 2.

COMMAND runs in the clone with its environment active: bert-jax pretrain --config=... --workdir=... The workdir and the
dataset must be on storage that all hosts share. Variables go before it: -- env NAME=VALUE bert-jax pretrain ...
USAGE
}

refuse() {
  printf 'launch/tpu_pod.sh: %s; see --help\n' "$*" >&2
  exit 2
}

say() { printf '%s tpu_pod: %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

quoted() { # prints words quoted for a shell
  local word words=''
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
    words+=" $word"
  done
  printf '%s' "${words# }"
}

# --- Arguments -------------------------------------------------------------------------------------------------------
verb=${1:-}
case $verb in
  create | setup | start | status | logs | stop | delete | watch) shift ;;
  -h | --help) usage && exit 0 ;;
  "") refuse "no verb given; expected create, setup, start, status, logs, stop, delete or watch" ;;
  *) refuse "$verb: unknown verb; expected create, setup, start, status, logs, stop, delete or watch" ;;
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
      [ $# -ge 2 ] || refuse "$1: expected a value, as in $1=VALUE"
      option=$1 value=$2 && shift 2
      ;;
    *) refuse "$1: unknown option; put the command after --" ;;
  esac
  [ -n "$value" ] || refuse "$option: expected a value, as in $option=VALUE"
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
    *) refuse "$option: unknown option" ;;
  esac
done
command=("$@")

[ -n "$name" ] || refuse "--name is missing; it is required"
[ -n "$zone" ] || refuse "--zone is missing; it is required, as in --zone=us-east5-b"
[[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
  refuse "--name=$name: invalid name; expected lower-case letters, digits and hyphens, as in bert-1"
for setting in "--node-count=$nodes" "--max-failures=$max_failures" "--poll=$poll"; do
  [[ ${setting#*=} =~ ^[0-9]+$ ]] || refuse "$setting: expected a whole number"
done
[ "$nodes" -ge 1 ] || refuse "--node-count=$nodes: expected at least 1 slice"
[ "$poll" -ge 1 ] || refuse "--poll=$poll: expected at least 1 second"
limit='' # seconds
if [ -n "$max_hours" ]; then
  [[ $max_hours =~ ^([0-9]{1,6})(\.([0-9]{1,4}))?$ ]] ||
    refuse "--max-hours=$max_hours: expected a number of hours, as in 2.5"
  fraction=${BASH_REMATCH[3]:-}0000
  limit=$((10#${BASH_REMATCH[1]} * 3600 + 10#${fraction:0:4} * 3600 / 10000))
  [ "$limit" -ge 1 ] || refuse "--max-hours=$max_hours: expected at least one second, as in 0.5 for half an hour"
  [ -z "$keep" ] || refuse "--max-hours=$max_hours does not support --keep, because it deletes the TPUs; omit one"
fi
case $verb in create | watch) [ -n "$accelerator" ] || refuse "--accelerator-type is missing; it is required" ;; esac
case $verb in start | watch) [ ${#command[@]} -gt 0 ] || refuse "no command given; put it after --" ;; esac
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
    [ -n "$repo" ] || repo=$(git -C "$here" remote get-url origin 2>/dev/null) ||
      refuse "--repo: this clone has no remote origin; give --repo=URL"
    checks+=("--repo=$repo" "--ref=$ref")
    [ -n "$ref" ] || ref=$(git -C "$here" rev-parse HEAD 2>/dev/null) ||
      refuse "--ref: this clone has no commit; give --ref=REF"
    ;;
esac
[ -n "$dry_run" ] || command -v gcloud >/dev/null || refuse "gcloud not found; install it from cloud.google.com/sdk"
if [ -z "$no_check" ]; then
  case $verb in
    create | setup | start | watch)
      for python in ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} "$here/../.venv/bin/python" "$(command -v python3)"; do
        [ ! -x "$python" ] || break
      done
      [ -x "$python" ] || refuse "python3 not found; launch/tpu_checks.py requires it; install it, or use --no-check"
      commit=$("$python" "$here/tpu_checks.py" "${checks[@]}" ${compile:+--compile} ${dry_run:+--dry-run} \
        -- "${command[@]}") || exit $?
      ref=${commit:-$ref}
      ;;
  esac
fi
if [ -n "$accelerator" ] && [ -z "$runtime" ]; then
  refuse "--accelerator-type=$accelerator: unknown runtime version; give --runtime-version=V"
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

on_hosts() { # all|first COMMAND
  local which=all
  [ "$1" = all ] || which=0
  # A host that is lost during the call is detected after two minutes.
  cloud compute tpus queued-resources ssh "$name" "${where[@]}" "--node=$which" "--worker=$which" --quiet \
    --ssh-flag=-oConnectTimeout=30 --ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oServerAliveCountMax=4 "--command=$2"
}

# --- Commands on the hosts: single lines, for a remote shell ----------------------------------------------------------
# The folder of a run on a host holds `ready` (the installed ref), `pid` (of the command), `status` (its exit status,
# once it has ended), `stopped`, `log` and `lock`. The parent process of the command holds the lock, so that a reused
# process id is not taken for a running command.
run="\$HOME/bert_jax_runs/$name"
# shellcheck disable=SC2016
tell='echo "tpu_pod $(hostname)'
is_running="[ -e $run/lock ] && ! flock --shared --nonblock $run/lock true"

setup() {
  local line
  line="set -e; mkdir -p $run; rm -f $run/ready"
  [ -z "$before" ] || line+="; bash -c $(quoted "$before")"
  # The images' own Python may be older than 3.11; uv installs 3.12.
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
troubles=0 trouble='' # number of consecutive checks in which gcloud failed, and whether the current one did
set_up='' started=''  # whether that was done on the current TPUs
mine=''               # whether the hosts' states are of a command that has run or was started since the watch began

resource_state() { # prints the state; ABSENT if there is none; UNKNOWN if gcloud failed
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

pause() { # SECONDS; tests set TPU_POD_SECOND_MS, the milliseconds of such a second
  local milliseconds=$(($1 * ${TPU_POD_SECOND_MS:-1000}))
  sleep "$((milliseconds / 1000)).$(printf %03d $((milliseconds % 1000)))"
}

wait_a_while() { # with exponential backoff while gcloud fails; never past the limit
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
  say "the TPUs could not be deleted and cost money; run: tpu_pod.sh delete $(quoted "--name=$name" "${where[@]}")"
}

end() { # EXIT_STATUS WHY [kept]
  say "$2"
  [ "$1" = 0 ] || logs || true
  [ -n "${3:-}" ] || [ -n "$keep" ] || give_back_for_good
  exit "$1"
}

end_in_time() { # after --max-hours; the command has five minutes to save
  local until=$(($(elapsed) + 300))
  say "--max-hours=$max_hours have passed: stopping the command, which saves"
  if [ "$(resource_state)" = ACTIVE ] && stop; then
    while [ "$(elapsed)" -lt "$until" ] && grep -q ' running$' <<<"$(host_states)"; do pause 5; done
  fi
  end 75 "--max-hours=$max_hours have passed; \`watch\` resumes from the last checkpoint"
}

failed() { # WHY; ends the watch after more than --max-failures
  failures=$((failures + 1))
  say "$1: failure $failures; --max-failures=$max_failures are retried"
  [ "$failures" -le "$max_failures" ] || end 1 "failed more than --max-failures=$max_failures times"
}

give_back() {
  set_up='' started=''
  delete || {
    trouble=yes
    say "the TPUs could not be deleted; retrying"
  }
}

launch() {
  mine=yes started=yes
  say "starting the command on all hosts"
  start || say "the command could not be started on all hosts"
}

# While the command runs on any host there is nothing to do: if a process is lost, the others end by themselves. After
# that, the worst state of a host decides.
decide() {
  local states=$1
  if grep -q ' running$' <<<"$states"; then
    mine=yes
  elif grep -q ' bare$' <<<"$states"; then
    [ -z "$set_up" ] || failed "the installation failed"
    set_up=yes
    say "setting up $ref on all hosts"
    setup || true
  elif [ -z "$mine" ]; then
    launch
  elif grep -q ' exited 2$' <<<"$states"; then
    end 2 "exit status 2: invalid input; fix what the log names"
  elif grep -q ' stopped$' <<<"$states"; then
    end 75 "stopped; the TPUs are kept: \`watch\` resumes the command, \`delete\` deletes the TPUs" kept
  elif grep -Eqv ' (idle|exited 0|exited 75)$' <<<"$states"; then
    failed "a process failed or was lost: $(tr '\n' ';' <<<"$states")"
    launch
  elif grep -q ' idle$' <<<"$states"; then
    [ -z "$started" ] || failed "the command did not start on all hosts"
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
    say "a node was preempted: requesting new TPUs"
    give_back
  elif states=$(host_states) && states=$(grep '^tpu_pod ' <<<"$states"); then
    silent=0
    decide "$states"
  else
    silent=$((silent + 1))
    say "not all hosts answer: check $silent of 20"
    if [ "$silent" -ge 20 ]; then
      silent=0
      failed "the hosts do not answer: requesting new TPUs"
      give_back
    fi
  fi
}

watch() {
  if [ -n "$dry_run" ]; then
    echo "# 1. request the TPUs, and poll until they are ACTIVE"
    create
    cloud compute tpus queued-resources describe "$name" "${where[@]}" '--format=value(state.state)'
    echo "# 2. install and start"
    setup
    start
    echo "# 3. poll every $poll seconds; restart after 75, and at most $max_failures times after a failure"
    node_states
    host_states
    echo "# 4. after a preemption: delete, and continue at 1; at the end: delete"
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
          failed "the request for TPUs could not be sent"
        }
        ;;
      ACTIVE) look_at_hosts ;;
      SUSPENDED)
        say "preempted: requesting new TPUs"
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
