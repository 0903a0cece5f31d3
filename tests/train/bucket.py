"""A server on loopback that answers as Google Cloud Storage does, as far as gcsfs, TensorStore and Orbax use it."""

import contextlib
import email
import http.server
import itertools
import json
import re
import threading
from urllib.parse import parse_qs, unquote, urlsplit

OBJECT = re.compile(r"(?:/upload|/download)?/storage/v1/b/([^/]+)(?:/o(?:/([^/]+))?)?(?:/moveTo/o/([^/]+))?")


class Bucket:
    """One bucket, called `bucket`, as a context manager; its content stays when the server is stopped and restarted."""

    def __init__(self):
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.lock, self.generations = threading.RLock(), itertools.count(1)
        self.refuses_writes = False
        self.refuses_after: int | None = None
        self.dies_after: int | None = None
        """Numbers of writes after which the server refuses writes, or stops."""
        self.writes = 0
        self.port = 0
        self._server = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def environment(self):
        address = f"http://127.0.0.1:{self.port}"
        return {
            "STORAGE_EMULATOR_HOST": address,  # gcsfs and google.cloud.storage
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",  # TensorStore
            "GOOGLE_CLOUD_PROJECT": "project",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # which would ask the real service for the bucket's layout
        }

    def start(self):
        bucket = self

        class Handler(_Handler):
            store = bucket

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self):
        server, self._server = self._server, None
        if server is not None:
            server.server_close()
            server.shutdown()

    @property
    def running(self):
        return self._server is not None

    def resource(self, name):
        generation, content = self.objects[name]
        return {
            "kind": "storage#object",
            "bucket": "bucket",
            "name": name,
            "generation": str(generation),
            "metageneration": "1",
            "size": str(len(content)),
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "contentType": "application/octet-stream",
        }

    def write(self, name, content):
        self.objects[name] = next(self.generations), content
        self.writes += 1
        if self.writes == self.refuses_after:
            self.refuses_writes = True
        if self.writes == self.dies_after:
            threading.Thread(target=self.stop).start()

    def listing(self, prefix="", delimiter="", startOffset="", endOffset="", **_):
        items, prefixes = [], {}
        for name in sorted(self.objects):
            if name.startswith(prefix) and name >= startOffset and (not endOffset or name < endOffset):
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    prefixes[prefix + rest.split(delimiter)[0] + delimiter] = None
                else:
                    items.append(self.resource(name))
        return {"kind": "storage#objects", "items": items, "prefixes": list(prefixes)}


class _Handler(http.server.BaseHTTPRequestHandler):
    store: Bucket

    def log_message(self, *_):
        pass

    def do_GET(self):
        with contextlib.suppress(OSError), self.store.lock:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            if not self.store.running:
                return  # the connection is closed without an answer
            status, content, headers = self.answer(self.command, self.path, body)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    def __getattr__(self, name):
        if name in ("do_POST", "do_PUT", "do_DELETE"):
            return self.do_GET
        raise AttributeError(name)

    def answer(self, method, address, body):
        url = urlsplit(address)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path.startswith("/batch/"):
            return self.batch(body)
        match = OBJECT.fullmatch(url.path)
        if match is None:
            return error(501)
        bucket, name, destination = (part and unquote(part) for part in match.groups())
        if bucket != "bucket":
            return error(404)
        store, name = self.store, name or query.get("name")
        if self.store.refuses_writes and method != "GET":
            return error(403)
        if name is None:
            return as_json(
                store.listing(**query) if url.path.endswith("/o") else {"kind": "storage#bucket", "name": bucket}
            )
        generation, content = store.objects.get(name, (0, b""))
        if int(query.get("ifGenerationMatch", generation)) != generation:
            return error(412)
        if query.get("ifGenerationNotMatch") == str(generation):
            return error(304)
        if url.path.startswith("/upload/") and "upload_id" not in query:
            if query["uploadType"] == "resumable":
                return 200, b"", {"Location": f"http://{self.headers['Host']}{address}&upload_id=1"}
            if query["uploadType"] == "multipart":
                head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
                body = email.message_from_bytes(head + body).get_payload()[1].get_payload(decode=True)
        if url.path.startswith("/upload/"):
            store.write(name, body)
            return as_json(store.resource(name))
        if not generation:
            return error(404)
        if destination is not None:
            store.write(destination, content)
        if destination is not None or method == "DELETE":
            del store.objects[name]
            return as_json(store.resource(destination)) if destination is not None else (204, b"", {})
        if query.get("alt") != "media":
            return as_json(store.resource(name))
        headers, status = {"x-goog-generation": str(generation)}, 200
        if (part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) is not None:
            start, end = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content, status = content[start : end + 1], 206
        return status, content, headers

    def batch(self, body):
        """Deletes many objects in one request."""
        message = email.message_from_bytes(f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode() + body)
        answers = []
        for part in message.get_payload():
            method, address, _ = part.get_payload().strip().split("\n")[0].split()
            status, _, _ = self.answer(method, address, b"")
            answers.append(
                f"--batch\r\nContent-Type: application/http\r\nContent-ID: <response-{part['Content-ID'].strip('<>')}>"
                f"\r\n\r\nHTTP/1.1 {status} -\r\nContent-Length: 0\r\n\r\n\r\n"
            )
        return 200, ("".join(answers) + "--batch--").encode(), {"Content-Type": "multipart/mixed; boundary=batch"}


def as_json(value):
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}


def error(status):
    reason = http.HTTPStatus(status).phrase
    content = b"" if status == 304 else json.dumps({"error": {"code": status, "message": reason}}).encode()
    return status, content, {"Content-Type": "application/json"}
