"""Emulator of Google Cloud Storage on the loopback interface, with fault injection."""

import io
import json
import logging
import re
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import HTTPServer
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import fsspec
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

BUCKET = "bucket"


class Emulator:
    """Serves `gs://bucket` from memory.

    Attributes:
      requests: "METHOD /path?query" of every request there was, not quoted, with the name of what is put.
      faults: for each request, the first of these that returns True has answered it.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.faults: list[Callable[[RequestHandler, str], bool]] = []
        logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)  # a missing object is not an error here
        self._storage = Storage(use_memory_fs=True)
        buckets.create_bucket(BUCKET, self._storage)
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, self, self._storage))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """Environment that directs gcsfs and TensorStore to this server, without credentials."""
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return {
            "STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true",
        }  # fmt: skip

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of the objects that begin with `prefix`, sorted."""
        return sorted(item["name"] for item in self._storage.get_file_list(BUCKET, prefix)[0])

    def read(self, name: str) -> bytes:
        return self._storage.get_file(BUCKET, name)

    def put(self, name: str, content: bytes) -> None:
        """Writes an object with a separate client."""
        store = fsspec.filesystem("gcs", skip_instance_cache=True)
        store.pipe_file(f"{BUCKET}/{name}", content)

    def delete(self, name: str) -> None:
        self._storage.delete_file(BUCKET, name)

    def count(self, *parts: str) -> int:
        """Returns the number of requests that contain all of `parts`."""
        return sum(all(part in request for part in parts) for request in self.requests)

    def fail(self, *parts: str, status: int, times: int = 1 << 30) -> None:
        """Answers the next `times` requests that contain all of `parts` with a status."""
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

    def clear(self) -> None:
        """Deletes all objects, recorded requests and faults."""
        self._storage.wipe(keep_buckets=True)
        self.requests.clear()
        self.faults.clear()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(HTTPServer):
    def handle_error(self, *_: object) -> None:
        """Ignores clients that have closed their connection."""


class _Handler(RequestHandler):
    def __init__(self, emulator: Emulator, storage: Storage, *arguments: object):
        self._emulator = emulator
        self._generation = "0"
        super().__init__(storage, *arguments)

    def parse_request(self) -> bool:
        """Handles a request once, unless a fault has answered it."""
        if not super().parse_request():
            return False
        request = f"{self.command} {unquote(self.path)}"
        if "uploadType=multipart" in self.path:  # the name is in the body
            body = self.rfile.read(int(self.headers["Content-Length"]))
            # The emulator treats a final "\r" of the content as part of the line end, which here is "\n".
            content, end, boundary = body.rpartition(b"\n--")
            body = content + b"\r" + end + boundary
            self.headers.replace_header("Content-Length", str(len(body)))
            self.rfile = io.BufferedReader(io.BytesIO(body))
            request += "&name=" + json.loads(re.search(rb"\{.*?\}", body)[0])["name"]
        self._emulator.requests.append(request)
        if any(fault(self, request) for fault in list(self._emulator.faults)):
            return False
        return self._keeps_conditions(urlsplit(self.path))

    def _keeps_conditions(self, url: SplitResult) -> bool:
        """Implements the generation preconditions of TensorStore, which the emulator does not support."""
        query = parse_qs(url.query)
        name = query["name"][0] if "name" in query else unquote(url.path.partition(f"/b/{BUCKET}/o/")[2])
        try:
            self._generation = str(self.storage.get_file_obj(BUCKET, name)["generation"])
        except NotFound:
            self._generation = "0"
        if query.get("ifGenerationMatch", [self._generation]) != [self._generation]:
            status = HTTPStatus.PRECONDITION_FAILED
        elif query.get("ifGenerationNotMatch", ["none"]) == [self._generation] != ["0"]:
            status = HTTPStatus.NOT_MODIFIED
        else:
            return True
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False

    def end_headers(self) -> None:
        if self.command == "GET" and "alt=media" in self.path:
            self.send_header("X-Goog-Generation", self._generation)
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass
