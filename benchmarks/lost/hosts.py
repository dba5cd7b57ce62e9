"""Hosts on one machine: each has its own network, host name and /etc/hosts; a bridge connects them, and can be cut."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_HOLD = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
_SUBNET = "10.77.0"


class NotPermitted(Exception):
    """This machine does not permit network namespaces; requires Linux, root and iproute2."""


class Hosts:
    """A bridge and `count` hosts; host K has the address 10.77.0.(K+1)."""

    def __init__(self, count: int, names: Path):
        """Connects the hosts that are held by processes; `names` is a file to be written in the format of /etc/hosts.

        Raises NotPermitted.
        """
        self.count, self._held = count, []
        entries = [f"{_SUBNET}.{number + 1} host{number}\n" for number in range(count)]
        names.write_text("127.0.0.1 localhost\n" + "".join(entries), encoding="utf-8")
        try:
            for _ in range(count + 1):
                self._held.append(_hold())
            self._bridge = self._held.pop()
            self._in(self._bridge, "-n", ["ip", "link", "add", "bridge0", "type", "bridge"])
            self._in(self._bridge, "-n", ["ip", "link", "set", "bridge0", "up"])
            for number in range(count):
                self._connect(number, names)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise NotPermitted(f"network namespaces: {error}") from error

    def _connect(self, number: int, names: Path) -> None:
        host, link = self._held[number], f"link{number}"
        peer = ["type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
        self._in(self._bridge, "-n", ["ip", "link", "add", link, *peer])
        self._in(self._bridge, "-n", ["ip", "link", "set", link, "master", "bridge0", "up"])
        self._in(host, "-n", ["ip", "address", "add", f"{_SUBNET}.{number + 1}/24", "dev", "eth0"])
        for device in ("lo", "eth0"):
            self._in(host, "-n", ["ip", "link", "set", device, "up"])
        self._in(host, "-u", ["hostname", f"host{number}"])
        self._in(host, "-m", ["mount", "--bind", str(names), "/etc/hosts"])

    def _in(self, held: subprocess.Popen, namespace: str, command: list[str]) -> None:
        words = ["nsenter", "-t", str(held.pid), namespace, *command]
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)

    def command(self, number: int, words: Sequence[str]) -> list[str]:
        """Returns the command that runs `words` on a host; its process is that of `words`."""
        return ["nsenter", "-t", str(self._held[number].pid), "-n", "-u", "-m", f"--wd={Path.cwd()}", *words]

    def cut(self, number: int) -> None:
        """Takes down the link of a host: packets are lost, and nobody is told."""
        self._in(self._bridge, "-n", ["ip", "link", "set", f"link{number}", "nomaster"])

    def reconnect(self, number: int) -> None:
        """Reconnects a host that was cut off."""
        self._in(self._bridge, "-n", ["ip", "link", "set", f"link{number}", "master", "bridge0"])

    def close(self) -> None:
        """Ends the hosts; their namespaces vanish with their last process."""
        for held in [*self._held, *([self._bridge] if hasattr(self, "_bridge") else [])]:
            held.kill()
            held.communicate()


def _hold() -> subprocess.Popen:
    """Starts a process that keeps new namespaces until it ends, or until this process does."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    held = subprocess.Popen(["unshare", "-n", "-u", "-m", *_HOLD], **pipes)
    assert held.stdout is not None
    assert held.stderr is not None
    if not held.stdout.readline():
        raise OSError(held.stderr.read().decode().strip() or "unshare failed")
    return held


@contextmanager
def connected_hosts(count: int, names: Path) -> Iterator[Hosts]:
    """Makes hosts, and ends them. Raises NotPermitted."""
    hosts = Hosts(count, names)
    try:
        yield hosts
    finally:
        hosts.close()


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns size and time of change, in nanoseconds, of each file below a folder."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            status = path.stat()
            found[path.relative_to(folder).as_posix()] = status.st_size, status.st_mtime_ns
    return found


def wait_until_ended(processes: dict[int, subprocess.Popen], limit: float) -> dict[int, float]:
    """Waits for processes; returns the seconds after which each ended. Those that have not ended are missing."""
    began, ended = time.monotonic(), {}
    while len(ended) < len(processes) and time.monotonic() - began < limit:
        for number, process in processes.items():
            if number not in ended and process.poll() is not None:
                ended[number] = time.monotonic() - began
        time.sleep(0.05)
    return ended
