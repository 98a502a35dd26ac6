"""A server with the part of Hugging Face's interface that downloads use, on this machine."""

import dataclasses
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+))?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclasses.dataclass
class Repository:
    """The files of each commit by path, and the commits of branches and tags."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False


class FakeHub:
    """Serves `repositories`, by name as in `hf://NAME`, while it is started."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []  # methods and paths
        self._server = self._serve(0)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def commit(self, name: str, files: Mapping[str, bytes], ref: str = "main") -> str:
        """Adds a commit of these files, which a branch or tag then has; returns its hash."""
        repository = self.repositories.setdefault(name, Repository({}, {}))
        commit = hashlib.sha1(f"{name}{sorted(files.items())}".encode()).hexdigest()
        repository.commits[commit] = dict(files)
        repository.refs[ref] = commit
        return commit

    def commit_folder(self, name: str, folder: Path, ref: str = "main") -> str:
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return self.commit(name, files, ref)

    def stop(self) -> None:
        """Ends the server: connections are refused."""
        self._server.shutdown()
        self._server.server_close()

    def start(self) -> None:
        self._server = self._serve(self._server.server_port)

    def _serve(self, port: int) -> ThreadingHTTPServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, headers, content = hub._answer(self.command, self.path)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    def _answer(self, method: str, url: str) -> tuple[int, dict[str, str], bytes]:
        path = urlsplit(url).path
        self.requests.append((method, path))
        if (api := _API.fullmatch(path)) is not None:
            kind, name, what, revision = api.groups()
            file, kind = None, kind.removesuffix("models")
        elif (found := _FILE.fullmatch(path)) is not None:
            kind, name, revision, file = found.groups()
            what, kind = "file", (kind or "").rstrip("/")
        else:
            return 404, {}, b""
        repository = self.repositories.get(f"{kind}/{name}".lstrip("/"))
        if repository is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if repository.gated and what == "file":
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        revision = unquote(revision or "main")
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = repository.commits[commit]
        if what == "file":
            if (content := files.get(unquote(file or ""))) is None:
                return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
            return 200, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": commit}, content
        answer: object = {"id": name, "sha": commit, "siblings": [{"rfilename": x} for x in files]}
        if what == "tree":
            answer = [
                {"type": "file", "path": path, "size": len(content), "oid": _oid(content)}
                for path, content in files.items()
            ]
        return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
