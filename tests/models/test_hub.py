"""The hub, played by a small local server: what it has is fetched, and every way it can fail is a reason given."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from legato.errors import ModelError, ModelNotFound
from legato.models import hub
from legato.models.aliases import HubFile

CONTENT = bytes(range(256)) * 2000
SHA = hashlib.sha256(CONTENT).hexdigest()
FILES = {"tiny.gguf": CONTENT, "model.safetensors": b"weights", "config.json": b"{}", "pytorch_model.bin": b"no"}
COMMIT = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """org/full has FILES, org/bare only config.json, org/gated answers 403, everything else 404."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if "gated" in parts:
            self.send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
        elif parts[:3] == ["api", "models", "org"] and parts[3] in ("full", "bare"):
            names = list(FILES) if parts[3] == "full" else ["config.json"]
            if "tree" in parts:
                listed = [
                    {"type": "file", "path": name, "size": len(FILES[name]), "oid": name.ljust(40, "0")}
                    for name in names
                ]
                self.send(200, json.dumps(listed).encode(), {}, body)
            else:
                siblings = [{"rfilename": name} for name in names]
                info = {"_id": "1", "id": f"org/{parts[3]}", "modelId": f"org/{parts[3]}", "sha": COMMIT}
                self.send(200, json.dumps(info | {"siblings": siblings}).encode(), {}, body)
        elif parts[:2] in (["org", "full"], ["org", "bare"]) and "resolve" in parts and parts[-1] in FILES:
            content = FILES[parts[-1]]
            etag = SHA if content is CONTENT else hashlib.sha1(content).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(content))}
            self.send(200, content, headers, body)
        else:
            missing = "EntryNotFound" if parts[:2] == ["org", "full"] else "RepoNotFound"
            self.send(404, b"", {"X-Error-Code": missing}, body)

    def send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A hub for `huggingface_hub`, with caches of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    _use(monkeypatch, address, tmp_path)
    yield address
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def no_endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub that nobody answers for."""
    _use(monkeypatch, "http://127.0.0.1:9", tmp_path)


def _use(monkeypatch: pytest.MonkeyPatch, address: str, tmp_path: Path) -> None:
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.usefixtures("endpoint")
def test_the_pinned_file_is_fetched_with_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    path = hub.fetch_pinned(HubFile("org/full", "tiny.gguf"), SHA, tmp_path, lambda *call: calls.append(call))
    assert path.read_bytes() == CONTENT and path.is_relative_to(tmp_path)
    assert calls[-1] == (len(CONTENT), len(CONTENT))


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize(
    ("wanted", "sha", "reason"),
    [
        (HubFile("org/full", "tiny.gguf"), "f" * 64, f"another file .sha256 {SHA[:12]}"),
        (HubFile("org/full", "none.gguf"), SHA, "404|Entry"),
        (HubFile("org/none", "tiny.gguf"), SHA, "404|Repository"),
        (HubFile("org/gated", "tiny.gguf"), SHA, "403|Gated"),
    ],
)
def test_a_hub_without_it_says_why(wanted: HubFile, sha: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(hub.HubUnavailableError, match=reason):
        hub.fetch_pinned(wanted, sha, tmp_path, lambda done, total: None)


@pytest.mark.usefixtures("no_endpoint")
def test_a_hub_that_is_not_reached_says_so_at_once(tmp_path: Path) -> None:
    with pytest.raises(hub.HubUnavailableError, match=r"ConnectError|refused"):
        hub.fetch_pinned(HubFile("org/full", "tiny.gguf"), SHA, tmp_path, lambda done, total: None)
    for model in ("org/full", "org/full/tiny.gguf"):
        with pytest.raises(ModelNotFound, match=r"did not deliver it.*ALIASES"):
            hub.fetch_model(model, "ALIASES", lambda done, total: None)


@pytest.mark.usefixtures("endpoint")
def test_a_repository_is_fetched_without_what_is_not_needed() -> None:
    folder = hub.fetch_model("org/full", "", lambda done, total: None)
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json"}


@pytest.mark.usefixtures("endpoint")
def test_one_file_of_a_repository_is_fetched() -> None:
    assert hub.fetch_model("org/full/tiny.gguf", "", lambda done, total: None).read_bytes() == CONTENT


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize(
    ("model", "error", "reason"),
    [
        ("org/none", ModelNotFound, "has no org/none.*ALIASES"),
        ("org/full/none.gguf", ModelNotFound, "has no org/full/none.gguf"),
        ("org/bare", ModelNotFound, "no safetensors; for one of its GGUF files"),
        ("org/gated", ModelError, "licence to be accepted.*hf auth login"),
    ],
)
def test_what_a_repository_lacks_is_said(model: str, error: type[ModelError], reason: str) -> None:
    with pytest.raises(error, match=reason):
        hub.fetch_model(model, "ALIASES", lambda done, total: None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", True),
        ("org/na.me-2/f.gguf", True),
        ("name", False),
        ("a/b/c", False),
        ("../x", False),
        ("/a", False),
    ],
)
def test_hub_ids_have_a_form(text: str, expected: bool) -> None:
    assert hub.looks_like_id(text) is expected
