"""An emulator of Google Cloud Storage on the loopback, whose answers can be made to fail."""

import io
import json
import re
import threading
from collections.abc import Callable
from functools import partial
from http.server import HTTPServer
from urllib.parse import quote

import fsspec
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

BUCKET = "bucket"


class Emulator:
    """Serves `gs://bucket` from memory.

    Attributes:
      requests: "METHOD /path?query" of every request there was, with the name of what is put.
      faults: for each request, the first of these that returns True has answered it.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.faults: list[Callable[[RequestHandler, str], bool]] = []
        self._storage = Storage(use_memory_fs=True)
        buckets.create_bucket(BUCKET, self._storage)
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, self, self._storage))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """For gcsfs and TensorStore: to ask this server, and nobody for credentials."""
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return {
            "STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true",
        }  # fmt: skip

    def names(self, prefix: str = "") -> list[str]:
        """The objects whose names begin with `prefix`, sorted."""
        return sorted(item["name"] for item in self._storage.get_file_list(BUCKET, prefix)[0])

    def read(self, name: str) -> bytes:
        return self._storage.get_file(BUCKET, name)

    def put(self, name: str, content: bytes) -> None:
        """As another client would."""
        store = fsspec.filesystem("gcs", skip_instance_cache=True)
        store.pipe_file(f"{BUCKET}/{name}", content)

    def count(self, *parts: str) -> int:
        """How many requests held all of `parts`."""
        return sum(all(part in request for part in parts) for request in self.requests)

    def fail(self, *parts: str, status: int, times: int = 1 << 30) -> None:
        """Answers the next `times` requests that hold all of `parts` with a status."""
        left = [times]

        def fault(handler: RequestHandler, request: str) -> bool:
            if left[0] <= 0 or not all(part in request for part in parts):
                return False
            left[0] -= 1
            handler.send_response(status)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return True

        self.faults.append(fault)

    def cut(self, *parts: str, name: str, times: int, honest: bool) -> None:
        """Sends half of an object. `honest`: as if that were all; else the connection ends before what was promised."""
        left = [times]

        def fault(handler: RequestHandler, request: str) -> bool:
            if left[0] <= 0 or not all(part in request for part in parts):
                return False
            left[0] -= 1
            content = self.read(name)
            half = content[: len(content) // 2]
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(half if honest else content)))
            handler.end_headers()
            handler.wfile.write(half)
            return True

        self.faults.append(fault)

    def clear(self) -> None:
        """Deletes all objects, forgets requests and takes faults away."""
        self._storage.wipe(keep_buckets=True)
        self.requests.clear()
        self.faults.clear()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(HTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that has gone does not wait for its answer."""


class _Handler(RequestHandler):
    def __init__(self, emulator: Emulator, storage: Storage, *arguments: object):
        self._emulator = emulator
        super().__init__(storage, *arguments)

    def parse_request(self) -> bool:
        """Called once a request: what a fault has answered is not handled."""
        if not super().parse_request():
            return False
        request = f"{self.command} {self.path}"
        if "uploadType=multipart" in self.path:  # the name is in the body
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.rfile = io.BufferedReader(io.BytesIO(body))
            request += "&name=" + quote(json.loads(re.search(rb"\{.*?\}", body)[0])["name"], safe="")
        self._emulator.requests.append(request)
        return not any(fault(self, request) for fault in list(self._emulator.faults))

    def log_message(self, *_: object) -> None:
        pass
