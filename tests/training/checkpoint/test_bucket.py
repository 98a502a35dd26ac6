"""Runs in a bucket, with an emulator of Google Cloud Storage."""

import base64
import hashlib
import itertools
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np
import pytest

from mtraining_jax.training.checkpoint import bucket, newest_step
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.utils.errors import UserError
from tests.training.common import changed, losses, run, written

pytestmark = pytest.mark.skipif(find_spec("gcsfs") is None, reason="needs gcsfs")


class Emulator(BaseHTTPRequestHandler):
    """The requests of gcsfs, google-cloud-storage and TensorStore, of Google's JSON API."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, tuple[int, bytes]]] = {}  # generation and content by name
    count = itertools.count(1)

    def do_GET(self):
        path, query = self.parts()
        if (name := self.named(path)) is None:
            if path == "/storage/v1/b/bucket":
                return self.answer(200, {"name": "bucket"})
            if path != "/storage/v1/b/bucket/o":
                return self.answer(404, {})
            prefix, end = query.get("prefix", ""), query.get("delimiter")
            items, folders = [], set()
            for name in sorted(self.objects):
                rest = name.removeprefix(prefix)
                if name.startswith(prefix) and end and end in rest:
                    folders.add(prefix + rest.partition(end)[0] + end)
                elif name.startswith(prefix):
                    items.append(self.about(name))
            return self.answer(200, {"items": items, "prefixes": sorted(folders)})
        if name not in self.objects:
            return self.answer(404, {})
        generation, content = self.objects[name]
        if query.get("alt") != "media":
            return self.answer(200, self.about(name))
        if query.get("ifGenerationNotMatch") == str(generation):
            return self.answer(304, b"")
        status = 200
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(part[1]), int(part[2] or len(content) - 1)
            status, size, content = 206, len(content), content[first : last + 1]
            span = f"bytes {first}-{first + len(content) - 1}/{size}"
            return self.answer(status, content, generation, Content_Range=span)
        return self.answer(status, content, generation)

    def do_POST(self):
        path, query = self.parts()
        if path != "/upload/storage/v1/b/bucket/o":
            return self.answer(404, {})
        content, name = self.body, query.get("name", "")
        if query["uploadType"] == "resumable":  # in chunks; what each test writes is one
            if "upload_id" not in query:
                where = f"http://{self.headers['Host']}{self.path}&upload_id=1"
                return self.answer(200, {}, Location=where)
        elif query["uploadType"] == "multipart":
            _, about, content = self.body.split(b"\n\n", 2)
            name = json.loads(about.partition(b"\n")[0])["name"]
            content = content[: content.rindex(b"\n--")]
        now = self.objects.get(name, (0, b""))[0]
        if query.get("ifGenerationMatch", str(now)) != str(now):
            return self.answer(412, {})
        self.objects[name] = next(self.count), content
        return self.answer(200, self.about(name))

    def do_DELETE(self):
        name = self.named(self.parts()[0])
        return self.answer(404 if self.objects.pop(name, None) is None else 204, b"")

    def parts(self):
        url = urlsplit(self.path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return url.path.removeprefix("/download"), dict(parse_qsl(url.query))

    def named(self, path):
        start = "/storage/v1/b/bucket/o/"
        return unquote(path.removeprefix(start)) if path.startswith(start) else None

    def about(self, name):
        generation, content = self.objects[name]
        checksum = base64.b64encode(hashlib.md5(content).digest()).decode()
        about = {"name": name, "bucket": "bucket", "size": str(len(content)), "md5Hash": checksum}
        return about | {"generation": str(generation), "updated": "2026-01-01T00:00:00.000Z"}

    def answer(self, status, content, generation=0, **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.send_header("x-goog-generation", str(generation))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module", autouse=True)
def _emulator():
    """A bucket named "bucket"; the libraries read the variables once per process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Emulator)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", url)  # of gcsfs and google-cloud-storage
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
        patch.setenv("GOOGLE_CLOUD_PROJECT", "test")
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # needs credentials
        yield
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def bucket_config(plain_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return changed(
        plain_config,
        run={"output_dir": f"gs://bucket/{tmp_path.name}/runs", "steps": 1},
        checkpoint={"keep": 1},
    )


def test_a_run_resumes_on_another_host(bucket_config, capsys, tmp_path):
    config = bucket_config
    run(config)
    local = Path("runs/bucket") / tmp_path.name / "runs/test"
    assert config.run.folder == local and not (local / "checkpoints").exists()
    assert newest_step(checkpoint_folder(config)) == 1
    shutil.rmtree("runs")  # the other host has no files

    longer = changed(config, run={"steps": 2})
    run(longer)
    assert "resuming from the checkpoint of step 1" in capsys.readouterr().out
    assert [record["step"] for record in written(longer)] == [1, 2]
    starts = (local / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["resumed_from_step"] for line in starts] == [None, 1]
    folder = checkpoint_folder(config)
    for path in local.iterdir():  # the same files in both places
        assert (folder.parent / path.name).read_text() == path.read_text()
    assert [path.name for path in folder.iterdir()] == ["2"]  # older ones are deleted

    expected = run(changed(config, run={"output_dir": str(tmp_path / "out"), "steps": 2}))
    np.testing.assert_array_equal(losses(written(longer)), losses(expected))

    with pytest.raises(UserError, match="and a bucket cannot rename its folder; to start from"):
        run(changed(config, checkpoint={"resume": False}))
    (folder / "2" / "commit_success.txt").unlink()  # as if killed while it was written
    assert newest_step(folder) is None


def test_a_bucket_that_cannot_be_used_stops_before_any_work(bucket_config, monkeypatch):
    other = changed(bucket_config, run={"output_dir": "gs://other"})
    with pytest.raises(UserError, match=r"^gs://other/test: cannot be written \(.+\); check the"):
        run(other)
    monkeypatch.setattr(bucket, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="^gs://other/test needs gcsfs: uv run --extra gcs, or pip"):
        run(other)
    assert not Path("runs").exists()
