"""Files from the Hugging Face hub, through huggingface_hub: its cache, token, endpoint and offline settings apply."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from legato.errors import ModelError, ModelNotFound
from legato.models.aliases import HubFile

Progress = Callable[[int, int], None]

_ID = re.compile(r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(/[^/\\]{1,200}\.gguf)?$")
_REACH_TIMEOUT_S = 5.0
_SNAPSHOT_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]


class HubUnavailableError(Exception):
    """The hub is not reached, or has no such file. The message says which."""


def looks_like_id(model: str) -> bool:
    """Whether `model` has the form org/name or org/name/file.gguf."""
    return _ID.match(model) is not None


def fetch_pinned(wanted: HubFile, sha256: str, downloads: Path, progress: Progress) -> Path:
    """The hub's file, in `downloads`, if its hash there is `sha256` (the hub's ETag says so before the transfer).

    Continues a partial file. Raises HubUnavailableError for any reason not to have it, OSError for the disk's.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        found = get_hf_file_metadata(hf_hub_url(wanted.repo, wanted.file), timeout=_REACH_TIMEOUT_S)
        if found.etag != sha256:
            raise HubUnavailableError(f"its {wanted.file} is another file (sha256 {str(found.etag)[:12]}...)")
        path = hf_hub_download(
            wanted.repo,
            wanted.file,
            local_dir=downloads / "hub",
            etag_timeout=_REACH_TIMEOUT_S,
            tqdm_class=_bar_class(progress),
        )
    except (HubUnavailableError, KeyboardInterrupt):
        raise
    except OSError as error:
        if error.errno is not None and error.filename is not None:  # the disk, not the network
            raise
        raise HubUnavailableError(_short(error)) from error
    except Exception as error:  # its HTTP library, and so the exceptions, changes between versions
        raise HubUnavailableError(_short(error)) from error
    return Path(path)


def fetch_model(model: str, known: str, progress: Progress) -> Path:
    """The folder of `org/name`, or the file of `org/name/file.gguf`, from the hub or its local cache.

    `known`: what to add to a message that there is no such model. Raises ModelNotFound or ModelError.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download

    organisation, name, *file = model.split("/")
    repo = f"{organisation}/{name}"
    try:
        if file:
            try:  # on its own hf_hub_download retries for half a minute before it looks into its cache
                get_hf_file_metadata(hf_hub_url(repo, file[0]), timeout=_REACH_TIMEOUT_S)
            except errors.HfHubHTTPError:
                raise
            except Exception:
                return Path(hf_hub_download(repo, file[0], local_files_only=True))
            return Path(hf_hub_download(repo, file[0], etag_timeout=_REACH_TIMEOUT_S, tqdm_class=_bar_class(progress)))
        folder = Path(snapshot_download(repo, allow_patterns=_SNAPSHOT_PATTERNS, etag_timeout=_REACH_TIMEOUT_S))
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repo} asks for its licence to be accepted: do so on its page on the hub, then run `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RemoteEntryNotFoundError) as error:
        raise ModelNotFound(f"the Hugging Face hub has no {model} (or it is private). {known}") from error
    except KeyboardInterrupt:
        raise
    except Exception as error:  # see fetch_pinned
        raise ModelNotFound(
            f"{model} is no existing path, and the Hugging Face hub did not deliver it: {_short(error)}. {known}"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFound(f"{repo} has no safetensors; for one of its GGUF files give {repo}/FILE.gguf")
    return folder


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _bar_class(progress: Progress) -> Any:
    """A tqdm that draws nothing and reports to `progress`."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._total = int(options.get("total") or 0)
            self._done = int(options.get("initial") or 0)
            super().__init__(*args, **(options | {"disable": True}))  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            self._done += int(n or 0)
            progress(self._done, self._total)
            return None

    return Bar
