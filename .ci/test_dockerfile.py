#!/usr/bin/env python3
"""Runs the steps of a Dockerfile in a chroot of Debian 13, for machines without Docker; requires root and debootstrap.

    .ci/test_dockerfile.py [docker/cpu.Dockerfile] [--folder build/docker] [--base CHROOT]

Debian 13's Python 3.13, in a virtual environment at /usr/local, stands in for the base image python:3.13-slim. At the
end the entry point trains a vocabulary as the image's user. `--base` is copied instead of a new debootstrap; a chroot
of `.ci/test_versions.sh py313` is one. The chroot in `--folder` is deleted at the end. Exit status: 0 if all steps and
checks succeed, 1 if one fails, 2 for an unsupported instruction.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BASE_IMAGE = "python:3.13-slim"
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
HOST_FILES = ("etc/resolv.conf", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt")


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yields (instruction, arguments) of a Dockerfile, with continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, arguments = line.strip().partition(" ")
        yield name, arguments.strip()


def make_base(root: Path, base: Path | None) -> None:
    """Makes the chroot of the base image."""
    if base is None:
        words = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "trixie"]
        subprocess.run([*words, str(root)], check=True)
    else:
        root.mkdir(parents=True)
        excluded = [f"--exclude=./{name}" for name in ("root", "proc", "dev", "sys")]
        with subprocess.Popen(["tar", "-C", str(base), *excluded, "-c", "."], stdout=subprocess.PIPE) as source:
            subprocess.run(["tar", "-C", str(root), "-x"], stdin=source.stdout, check=True)
        for name in ("root", "proc", "dev", "sys"):
            (root / name).mkdir()
    for name in HOST_FILES:
        if Path("/", name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(f"/{name}", root / name)
    run(root, ["python3", "-m", "venv", "/usr/local"])


def run(
    root: Path, words: Sequence[str], *, user: str = "0", folder: str = "/", environment: dict[str, str] | None = None
) -> None:
    """Runs a command in the chroot, in a mount namespace that ends with it."""
    variables = {"PATH": PATH, "HOME": "/root" if user == "0" else "/tmp", **(environment or {})}
    script = (
        'mount -t proc proc "$0/proc"; mount --rbind /dev "$0/dev"; user=$1 folder=$2; shift 2; '
        'exec chroot --userspec="$user:$user" "$0" env --ignore-environment --chdir="$folder" "$@"'
    )
    settings = [f"{name}={value}" for name, value in variables.items()]
    inside = ["unshare", "--mount", "--fork", "bash", "-euc", script, str(root), user, folder, *settings, *words]
    print("+", shlex.join(words), flush=True)
    subprocess.run(inside, check=True)


def copy(root: Path, sources: Sequence[str], target: Path) -> None:
    """Copies files and folders of the repository as COPY does: of a folder its contents."""
    for source in (REPOSITORY / name for name in sources):
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def build(root: Path, text: str, base: Path | None) -> tuple[list[str], str, dict[str, str], str]:
    """Runs all steps; returns entry point, user, environment and working folder."""
    environment: dict[str, str] = {}
    user, folder, entry_point = "0", "/", list[str]()
    for name, arguments in instructions(text):
        if name == "FROM" and arguments == BASE_IMAGE:
            make_base(root, base)
        elif name == "ENV":
            environment |= dict(setting.split("=", 1) for setting in shlex.split(arguments))
        elif name == "WORKDIR":
            folder = arguments
            (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, target = arguments.split()
            copy(root, sources, root / folder.lstrip("/") / target)
        elif name == "RUN":
            run(root, ["sh", "-c", arguments], user=user, folder=folder, environment=environment)
        elif name == "USER":
            user = arguments
        elif name == "ENTRYPOINT":
            entry_point = json.loads(arguments)
        elif name not in ("LABEL", "CMD"):
            print(f"{name} {arguments}: unsupported instruction", file=sys.stderr)
            sys.exit(2)
    return entry_point, user, environment, folder


def main() -> None:
    """Builds the chroot and checks it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dockerfile", nargs="?", type=Path, default=REPOSITORY / "docker" / "cpu.Dockerfile")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "docker", help="place of the chroot")
    parser.add_argument("--base", type=Path, help="a chroot of Debian 13 with python3-venv, which is copied")
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("requires root")
    root = options.folder.resolve() / "root"
    if root.exists():
        parser.error(f"{root} already exists; delete it")
    try:
        entry_point, user, environment, folder = build(root, options.dockerfile.read_text(), options.base)
        inside = {"user": user, "folder": folder, "environment": environment}
        run(root, ["sh", "-c", "test $(id -u) != 0 && python -c 'import bert_jax, jax'"], **inside)
        run(root, ["sh", "-c", "echo the ship sees the moon . > text.txt"], **inside)
        run(
            root,
            [*entry_point, "vocab", "--input", "text.txt", "--output", "tokenizer.json", "--size", "100"],
            **inside,
        )
    except subprocess.CalledProcessError as error:
        print(f"{options.dockerfile}: status {error.returncode} of {error.cmd[-1]}", file=sys.stderr)
        sys.exit(1)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"{options.dockerfile}: all steps and checks succeeded")


if __name__ == "__main__":
    main()
