"""Hugging Face Hub on the loopback interface: repositories of datasets and buckets, for huggingface_hub."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/datasets/(\w+/\w+)(?:/(revision|tree|paths-info)/(\w+)(?:/(.*))?)?")
RESOLVE = re.compile(r"/datasets/(\w+/\w+)/resolve/(\w+)/(.*)")


class Hub:
    """Serves the datasets `repositories`: for a name and a revision the files, by path.

    Attributes:
      requests: "METHOD /path" of every request.
    """

    def __init__(self, repositories: dict[str, dict[str, dict[str, bytes]]]) -> None:
        self.repositories = repositories
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """Environment that directs huggingface_hub to this server."""
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return {"HF_ENDPOINT": url, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if match := API.fullmatch(path):
            self._describe(*match.groups())
        elif match := RESOLVE.fullmatch(path):
            self._send(*match.groups())
        else:
            self._answer(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_POST = do_GET

    def _describe(self, name: str, what: str | None, revision: str | None, below: str | None) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        revisions = self.hub.repositories.get(name)
        if revisions is None:
            self._answer(404, {"error": "no repository"}, {"X-Error-Code": "RepoNotFound"})
            return
        files = revisions.get(revision or "main")
        if files is None:
            self._answer(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
            return
        if what in (None, "revision"):
            self._answer(200, {"id": name, "sha": "0" * 40})
            return
        entries = _entries(files)
        if what == "paths-info":
            wanted = json.loads(body)["paths"] if body[:1] == b"{" else []
            self._answer(200, [entry for entry in entries if entry["path"] in wanted])
            return
        found = [entry for entry in entries if not below or entry["path"].startswith(f"{below}/")]
        if "recursive=true" not in self.path.lower():
            depth = below.count("/") + 1 if below else 0
            found = [entry for entry in found if entry["path"].count("/") == depth]
        if found:
            self._answer(200, found)
        else:
            self._answer(404, {"error": "no entry"}, {"X-Error-Code": "EntryNotFound"})

    def _send(self, name: str, revision: str, path: str) -> None:
        content = self.hub.repositories[name][revision][path]
        first, last = 0, len(content) - 1
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2]), last)
        part = content[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for key, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _entries(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """Returns files and folders as the Hub lists them."""
    folders = {path[:at] for path in files for at in range(len(path)) if path[at] == "/"}
    entries: list[dict[str, Any]] = [
        {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}
        for path in sorted(folders)
    ]
    return entries + [
        {"type": "file", "path": path, "oid": hashlib.sha1(content).hexdigest(), "size": len(content)}
        for path, content in sorted(files.items())
    ]
