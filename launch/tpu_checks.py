"""Checks what launch/tpu_pod.sh needs before it requests TPUs: their name, the commit, the command, config and buckets.

Prints the commit that the hosts install. An error is one line on stderr, with exit status 2.

    python launch/tpu_checks.py --accelerator-type=v6e-8 --repo=URL --ref=main -- bert-jax pretrain --config=...
"""

import argparse
import contextlib
import difflib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

CLONE = Path(__file__).resolve().parents[1]
_SMALL = (1, 4, 8, 16, 32, 64, 128, 256)
SIZES = {  # by accelerator type, from the Cloud TPU docs: chips for v5litepod and v6e, else cores (two per chip)
    "v2": (8, 32, 128, 256, 512),
    "v3": (8, 32, 64, 128, 256, 512, 1024, 2048),
    "v4": (8, 16, 32, 64, 128, 256, 384, 512, 1024, 1536, 2048, 4096),
    "v5litepod": _SMALL,
    "v5p": (8, 16, 32, 64, *range(128, 12_288 + 1, 128)),  # from 128 cores: at most 96 cubes of 4x4x4 chips
    "v6e": _SMALL,
}
_ALIASES = {"v5e": "v5litepod", "v5lite": "v5litepod", "v6": "v6e", "v5": "v5p", "v6lite": "v6e"}
_NEAR = 4
_BUCKET = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(/.*)?")
_GIT = {"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oConnectTimeout=20"}


def main(arguments: Sequence[str]) -> None:
    """Checks what the options name, and prints the commit to install (empty without --repo)."""
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--accelerator-type")
    parser.add_argument("--node-count", type=int, default=1)
    parser.add_argument("--repo")
    parser.add_argument("--ref")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(words[:at])
    if options.accelerator_type:
        check_accelerator(options.accelerator_type)
    commit = check_commit(options.repo, options.ref) if options.repo else ""
    if command := words[at + 1 :]:
        check_command(command, options.accelerator_type, options.node_count, options.compile, options.dry_run)
    print(commit)


def refuse(text: str) -> NoReturn:
    """Prints one line on stderr and exits with status 2."""
    print(f"launch/tpu_pod.sh: {' '.join(text.split())} (--no-check skips all checks)", file=sys.stderr)
    raise SystemExit(2)


def note(text: str) -> None:
    """Prints one line on stderr."""
    print(f"tpu_pod: {text}", file=sys.stderr)


# --- The accelerator ---------------------------------------------------------------------------------------------


def check_accelerator(name: str) -> None:
    """Refuses an unknown type or size of accelerator, and names the nearest known ones."""
    kind, _, size = name.partition("-")
    if kind == "tpu7x":
        refuse(f"--accelerator-type={name}: only GKE and Compute Engine serve TPU7x; use launch/gke_jobset.sh")
    if kind not in SIZES:
        meant = _ALIASES.get(kind) or (difflib.get_close_matches(kind, SIZES, 1, 0.5) or [""])[0]
        near = f"{meant}-{size}" if size.isdigit() and int(size) in SIZES.get(meant, ()) else ""
        kinds = ", ".join(f"{kind}-{sizes[min(3, len(sizes) - 1)]}" for kind, sizes in SIZES.items())
        refuse(f"--accelerator-type={name}: unknown type; use {near or f'a type and a size, such as {kinds}'}")
    if not size.isdigit() or int(size) not in SIZES[kind]:
        wanted = int(size) if size.isdigit() else 0
        near = sorted(sorted(SIZES[kind], key=lambda known: abs(known - wanted))[:_NEAR])
        refuse(f"--accelerator-type={name}: unknown size; use {', '.join(f'{kind}-{known}' for known in near)}")


def topology(name: str) -> str:
    """Returns libtpu's name of an accelerator's chips: v5e:4x4 for v5litepod-16, v5p:4x4x8 for v5p-256."""
    kind, size = name.split("-")
    chips = int(size) if kind in ("v5litepod", "v6e") else int(size) // 2
    if kind in ("v4", "v5p"):
        cubes = chips // 64
        a, b, c = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}.get(chips) or min(
            ((4 * x, 4 * y, 4 * (cubes // (x * y))) for x in range(1, cubes + 1) for y in range(x, cubes + 1)
             if cubes % (x * y) == 0 and cubes // (x * y) >= y), key=sum,
        )  # fmt: skip
        return f"{kind}:{a}x{b}x{c}"
    short = max(side for side in range(1, chips + 1) if chips % side == 0 and side * side <= chips)
    return f"{kind.replace('v5litepod', 'v5e')}:{short}x{chips // short}"


# --- The commit --------------------------------------------------------------------------------------------------


def check_commit(repo: str, ref: str) -> str:
    """Returns the commit of `ref` in `repo`, where "" means the commit of this clone.

    Refuses a repository that cannot be read and a ref that is not pushed there.
    """
    if not ref:
        ref = _git("rev-parse", "HEAD").strip()
        if changed := len(_git("status", "--porcelain").splitlines()):
            note(f"the hosts install commit {ref[:12]} without {changed} changed or new files; commit and push them")
    listed = _run_git("ls-remote", repo)
    if listed.returncode:
        refuse(f"--repo={repo} cannot be read ({_last_line(listed.stderr)}); give a URL that the hosts can clone")
    if repo.startswith(("git@", "ssh://", "/", "file://")):
        note(f"--repo={repo}: the hosts have neither your keys nor your disk; an https:// URL works")
    tips = {name: commit for commit, name in (line.split("\t") for line in listed.stdout.splitlines())}
    for name in (f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}", f"refs/heads/{ref.removeprefix('origin/')}"):
        if name in tips:
            return tips[name]
    if not re.fullmatch("[0-9a-f]{7,40}", ref):
        close = difflib.get_close_matches(ref, [name.split("/", 2)[-1] for name in tips], 1, 0.6)
        meant = f"; did you mean {close[0]}?" if close else "; push it, or give a branch, a tag or a commit"
        refuse(f"--ref={ref}: no such branch or tag in {repo}{meant}")
    commit = _run_git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").stdout.strip() or ref
    if commit in tips.values() or any(_is_ancestor(commit, tip) for tip in tips.values()) or _fetches(repo, commit):
        return commit
    refuse(f"--ref={ref}: commit not found in {repo}; git push, or give another --ref")


def _is_ancestor(commit: str, tip: str) -> bool:
    return _run_git("merge-base", "--is-ancestor", commit, tip).returncode == 0


def _fetches(repo: str, commit: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        _run_git("init", "--quiet", "--bare", folder)
        return _run_git("-C", folder, "fetch", "--quiet", "--depth=1", repo, commit).returncode == 0


def _git(*words: str) -> str:
    done = _run_git(*words)
    if done.returncode:
        refuse(f"--ref: this clone has no commit ({_last_line(done.stderr)}); give --repo and --ref")
    return done.stdout


def _run_git(*words: str) -> subprocess.CompletedProcess:
    slow = ["-c", "http.lowSpeedLimit=1", "-c", "http.lowSpeedTime=20"]
    command = ["git", "-C", str(CLONE), *slow, *words]
    try:
        return subprocess.run(command, env={**os.environ, **_GIT}, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        refuse("git not found; install it, or use another machine")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


# --- The command -------------------------------------------------------------------------------------------------


def check_command(words: Sequence[str], accelerator: str | None, slices: int, compiles: bool, is_dry: bool) -> None:
    """Refuses a `bert-jax` command that would fail at once: a typo, an invalid config, a missing bucket."""
    arguments = _bert_jax_arguments(words)
    if arguments is None:
        close = difflib.get_close_matches(Path(words[0]).name, ["bert-jax"], 1, 0.7)
        if close:
            refuse(f"{words[0]}: unknown command; did you mean bert-jax?")
        note(f"{words[0]}: the command is not checked, because it is not bert-jax")
        return
    os.chdir(CLONE)  # the hosts run the command in their clone
    try:
        import bert_jax.cli
    except ImportError as error:
        refuse(
            f"bert-jax: the command cannot be checked, because {sys.executable} has no bert_jax ({error}); activate "
            "the environment that has it"
        )
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            options = bert_jax.cli.parse(arguments)
    except SystemExit:
        refuse(_last_line(output.getvalue()))
    from bert_jax.errors import InputError

    try:
        inputs = list(_check_config(options))
    except InputError as error:
        refuse(f"bert-jax {options.command}: {error}")
    _check_places(getattr(options, "workdir", None), inputs, writes=not is_dry)
    if compiles:
        _check_fit(options, accelerator, slices)


def _bert_jax_arguments(words: Sequence[str]) -> list[str] | None:
    """Returns the arguments of `bert-jax`, with or without `env NAME=VALUE ...` before it; None for another command."""
    rest = list(words)
    if rest[0] == "env":
        rest.pop(0)
        while rest and re.match(r"[A-Za-z_]\w*=|-i$|-u.", rest[0]):
            rest.pop(0)
    if rest[:1] and Path(rest[0]).name == "bert-jax":
        return rest[1:]
    if rest[1:3] == ["-m", "bert_jax.cli"]:
        return rest[3:]
    return None


def _check_config(options: argparse.Namespace) -> Iterator[str]:
    """Yields the files and folders that a run reads. Raises InputError for an invalid config."""
    if options.command not in ("pretrain", "finetune"):
        return
    if not options.workdir:
        refuse("--workdir: expected a folder, got ''; give --workdir=gs://BUCKET/FOLDER")
    from bert_jax.config import FinetuneConfig, load_config

    if options.command == "finetune":
        from bert_jax.finetuning.checks import check_config

        config = load_config(options.config, options.overrides, kind=FinetuneConfig)
        check_config(config)
        yield from (path for path in (config.init, config.data.path) if path)
        return
    from bert_jax.training.initialization import fill_in_from_checkpoint
    from bert_jax.training.phases import check_config as check_pretraining
    from bert_jax.training.phases import data_paths, plan_phases

    config = fill_in_from_checkpoint(load_config(options.config, options.overrides))
    check_pretraining(config, config.total_steps)
    for plan in plan_phases(config):
        check_pretraining(plan.config, plan.stop - plan.start)
        yield from (f"{path.rstrip('/')}/dataset.json" for path in data_paths(plan.config))
    if config.init:
        yield config.init


def _check_places(workdir: str | None, inputs: Sequence[str], *, writes: bool) -> None:
    """Refuses invalid gs:// names, unreadable inputs and, if `writes`, a workdir that is not writable."""
    for place in dict.fromkeys([*inputs, *([workdir] if workdir else [])]):
        if re.match(r"gs:", place) and not _BUCKET.fullmatch(place):
            refuse(f"{place}: invalid name on Google Cloud Storage; expected gs://BUCKET/FOLDER")
    if workdir and "://" in workdir and not workdir.startswith("gs://"):
        refuse(f"--workdir={workdir}: expected a path on a shared disk or on gs://; use gs://BUCKET/FOLDER")
    if workdir and not workdir.startswith(("gs://", "/")):
        note(f"--workdir={workdir}: on the hosts' own disks, it is deleted with the TPUs; use gs://BUCKET/FOLDER")
    remote = [place for place in dict.fromkeys(inputs) if place.startswith("gs://")]
    if not shutil.which("gcloud"):
        return
    for place in remote:
        _storage(f"{place} cannot be read", "give the folder that `bert-jax prepare` wrote", "ls", place)
    if not workdir or not workdir.startswith("gs://"):
        return
    bucket = f"gs://{_BUCKET.fullmatch(workdir)[1]}"
    _storage(f"--workdir={workdir}: {bucket} cannot be read", "create the bucket, or log in to gcloud", "ls", bucket)
    if writes:
        marker = f"{workdir.rstrip('/')}/.tpu_pod_check"
        _storage(f"--workdir={workdir} cannot be written to", "ask for the role Storage Object User", "cp", "-", marker)
        _storage(f"{marker} cannot be deleted", "ask for the role Storage Object User", "rm", marker)


def _storage(problem: str, fix: str, *words: str) -> None:
    done = subprocess.run(
        ["gcloud", "storage", *words, "--quiet"], input="check\n", capture_output=True, text=True, check=False
    )
    if done.returncode:
        refuse(f"{problem} ({_last_line(done.stderr)}); {fix}")


def _check_fit(options: argparse.Namespace, accelerator: str | None, slices: int) -> None:
    """Refuses a run whose step does not fit into the accelerator's memory or does not compile for it."""
    if options.command != "pretrain" or not accelerator:
        refuse("--compile supports only `bert-jax pretrain` with an --accelerator-type; omit --compile")
    chips = topology(accelerator)
    note(f"compiling the step for {slices} x {chips}; this takes a minute or more")
    done = subprocess.run(
        [
            sys.executable, "-m", "bert_jax.cli", "compile", f"--config={options.config}", f"--topology={chips}",
            f"--num_slices={slices}", *(f"--config.{key}={text}" for key, text in options.overrides),
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        refuse(_last_line(done.stderr))


if __name__ == "__main__":
    main(sys.argv[1:])
