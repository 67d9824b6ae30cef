"""Finds weights by address: a local path, or a `gs://` or `hf://` address to download.

Uses OpenPI's download cache in OpenPI's layout, so both programs share one copy.
"""

import importlib.util
import os
import re
import shutil
from pathlib import Path
from typing import Any

import filelock

from pirl.errors import CheckpointError, MissingExtraError
from pirl.paths import openpi_home

_PUBLIC_BUCKETS = ("openpi-assets", "vertex-model-garden-paligemma-us")


def to_download(location: str | os.PathLike[str]) -> str:
    """Local folder of a gs:// or hf:// address that is not downloaded yet; empty otherwise."""
    address = re.match(r"(gs|hf):/+(.*)", os.fspath(location))
    if address is None:
        return ""
    if address[1] == "hf":
        return "the hub's cache"
    cached = openpi_home() / address[2].strip("/")
    return "" if cached.exists() else str(cached)


def fetch(location: str | os.PathLike[str]) -> Path:
    """The local path of `location`, downloaded if necessary; the error lists every place searched."""
    text = os.fspath(location)
    # pathlib turns "gs://bucket" into "gs:/bucket", so accept a single slash.
    address = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", text)
    if address is None:
        path = Path(text).expanduser()
        if not path.exists():
            raise CheckpointError(
                f"there is nothing at {path.absolute()}",
                hint="give a checkpoint directory or file, or an address such as gs://openpi-assets/checkpoints/pi0_base",
            )
        return path
    scheme, rest = address[1], address[2].strip("/")
    if scheme == "gs" and rest:
        return _from_google_storage(rest)
    if scheme == "hf" and rest.count("/") >= 1:
        return _from_hugging_face(rest)
    raise CheckpointError(
        f"cannot read weights from {text!r}",
        hint="known are local paths, gs://bucket/path and hf://owner/repository[@revision][/path]",
    )


def download(filesystem: Any, remote: str, target: Path) -> Path:
    """Copy a remote file or folder to `target` through fsspec, atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # The same names as OpenPI's downloader, so that the two wait for each other.
    with filelock.FileLock(target.with_suffix(".lock")):
        if not target.exists():
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.unlink(missing_ok=True)
            filesystem.get(remote, os.fspath(partial), recursive=True)
            os.replace(partial, target)
    return target


def _from_google_storage(rest: str) -> Path:
    cached = openpi_home() / rest
    if cached.exists():
        return cached
    if importlib.util.find_spec("gcsfs") is None:
        raise MissingExtraError("gcsfs", "gcs", f"downloading gs://{rest} (not in OpenPI's cache, {cached})")
    import fsspec

    anonymous = {"token": "anon"} if rest.split("/")[0] in _PUBLIC_BUCKETS else {}
    try:
        return download(fsspec.filesystem("gs", **anonymous), rest, cached)
    except Exception as error:
        raise CheckpointError(
            f"gs://{rest} could not be had; looked at {cached} (OpenPI's cache) and at gs://{rest}: {error}",
            hint="check the network, or copy the folder into the cache by other means (OPENPI_DATA_HOME moves it)",
        ) from error


def _from_hugging_face(rest: str) -> Path:
    import huggingface_hub

    owner, repository, *parts = rest.split("/")
    repository, _, revision = repository.partition("@")
    inside = "/".join(parts)
    try:
        root = huggingface_hub.snapshot_download(
            f"{owner}/{repository}",
            revision=revision or None,
            allow_patterns=[inside, f"{inside}/*"] if inside else None,
        )
    except Exception as error:
        cache = huggingface_hub.constants.HF_HUB_CACHE
        raise CheckpointError(
            f"hf://{rest} could not be had; looked at {cache} (the hub's cache) and at the hub: {error}",
            hint="check the network and the name, and log in (`hf auth login`) if the repository is private",
        ) from error
    path = Path(root) / inside
    if not path.exists():
        raise CheckpointError(f"hf://{owner}/{repository} holds no {inside!r}", hint="check the path inside it")
    return path
