#!/usr/bin/env bash
# Runs the tests at each end of the supported versions and records the versions of the packages.
#
#   .ci/test_versions.sh [END...] [-- PYTEST ARGUMENTS]     (or `make test-versions`)
#
#   lowest   Python 3.11, the lowest supported version of each package: only the tests of model and training step
#   py311    Python 3.11, the newest supported versions
#   py313    Python 3.13, the newest supported versions
#
# The default is all three, one after the other. Each END writes constraints/END.txt once its tests pass, for
# `pip install -c constraints/END.txt bert-jax`. With PYTEST ARGUMENTS, which may select some tests, it writes nothing.
# Without pythonX.Y on the PATH an END runs in a chroot of the Debian release that has it (3.11: bookworm, 3.13: trixie);
# this requires root and debootstrap.
# VERSIONS_DIR is the folder of environments and chroots; EXTRAS adds extras to `dev` (such as `,parity`).
set -euo pipefail
cd "$(dirname "$0")/.."

repository=$PWD
folder=${VERSIONS_DIR:-$PWD/build/versions}
ends=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  ends+=("$1")
  shift
done
[ $# -eq 0 ] || shift
[ ${#ends[@]} -gt 0 ] || ends=(lowest py311 py313)

debian_with() {
  case $1 in
    3.11) echo bookworm ;;
    3.13) echo trixie ;;
  esac
}

# Runs in the copy of the repository: installs, tests, and writes the versions to constraints/END.txt.
inside() {
  set -euo pipefail
  local end=$1 python=$2 extras=$3
  shift 3
  local environment=.venv-$end part=$#
  [ -e "$environment/bin/python" ] || "$python" -m venv "$environment"
  local constraints=()
  if [ "$end" = lowest ]; then
    "$python" - > lowest.txt <<'PYTHON'
import re
for requirement in open("requirements.txt"):
    if found := re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+),", requirement):
        print("==".join(found.groups()))
PYTHON
    constraints=(--constraint lowest.txt)
    [ $# -gt 0 ] || set -- tests/model tests/training/test_train_step.py tests/training/test_restore_across_meshes.py
  fi
  "$environment/bin/python" -m pip install --quiet --prefer-binary "${constraints[@]}" --editable ".[dev$extras]"
  PATH="$PWD/$environment/bin:$PATH" JAX_PLATFORMS=cpu \
    "$environment/bin/python" -m pytest -n auto --dist loadscope \
    --deselect tests/test_supported_versions.py::test_what_the_tests_ran_with_is_in_range "$@"
  [ "$part" -eq 0 ] || return 0
  mkdir -p constraints
  "$environment/bin/python" -m pip freeze --exclude-editable | sed 's/+cpu$//' > "constraints/$end.txt"
}

# Copies the repository to the folder, and keeps only environments and the compile cache of an earlier run there.
copy_to() {
  mkdir -p "$1"
  find "$1" -mindepth 1 -maxdepth 1 ! -name '.venv-*' ! -name .pytest_cache -exec rm -rf {} +
  git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- | tar --extract --directory="$1"
}

in_chroot() {
  local root=$1 end=$2 python=$3
  shift 3
  if [ ! -e "$root/usr/bin/$python" ]; then
    debootstrap --variant=minbase --include=python3,python3-venv,git,make,ca-certificates \
      "$(debian_with "${python#python}")" "$root"
  fi
  for file in /etc/resolv.conf /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
    [ ! -e "$file" ] || install -D --mode=644 "$file" "$root$file"
  done
  echo "127.0.0.1 localhost $(hostname)" > "$root/etc/hosts"  # a process binds to the address of its hostname
  copy_to "$root/root/bert_jax"
  # In its own mount namespace, so that the mounts end with the process.
  # shellcheck disable=SC2016  # the inner shell expands it
  unshare --mount --fork bash -euc '
    mount -t proc proc "$0/proc"
    mount --rbind /dev "$0/dev"
    exec chroot "$0" env HOME=/root PATH=/usr/local/bin:/usr/bin:/bin bash -c "cd /root/bert_jax && $1" bash "${@:2}"
  ' "$root" "$(declare -f inside); inside \"\$@\"" "$end" "$python" "${EXTRAS:-}" "$@"
  cp "$root/root/bert_jax/constraints/$end.txt" "$repository/constraints/$end.txt"
}

for end in "${ends[@]}"; do
  case $end in
    lowest | py311) version=3.11 ;;
    py313) version=3.13 ;;
    *) echo ".ci/test_versions.sh: END=$end: unknown; expected lowest, py311 or py313" >&2 && exit 2 ;;
  esac
  echo "== $end: Python $version"
  if "python$version" -c "" 2> /dev/null; then  # a shim of pyenv may exist without its Python
    copy_to "$folder/$end"
    (cd "$folder/$end" && inside "$end" "python$version" "${EXTRAS:-}" "$@")
    cp "$folder/$end/constraints/$end.txt" "$repository/constraints/$end.txt"
  else
    in_chroot "$folder/debian-$(debian_with "$version")" "$end" "python$version" "$@"
  fi
done
