"""A checkpoint's metadata: a local directory, or a pinned ``repo@revision`` found in the local cache.

Nothing is downloaded and nothing is executed. Precedence of image settings follows transformers: the object
``image_processor`` of ``processor_config.json`` if that key is there, else the flat ``preprocessor_config.json``. The
video settings beside it have budgets of their own and are never looked into.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from planner.errors import CheckpointError, Reason
from planner.extras import require
from planner.fields import Object, invalid

NESTED = "processor_config.json"
FLAT = "preprocessor_config.json"
MAX_JSON_BYTES = 8 << 20
_METADATA = ["*.json", "*.jinja", "*.model", "*.txt"]
_log = logging.getLogger(__name__)


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The image processor's settings, where they stand, and the processor class named beside them."""

    values: Object
    origin: str
    processor_class: Any = None


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A directory with a checkpoint's metadata; ``name`` is how it was asked for."""

    directory: Path
    name: str

    def config(self) -> Object:
        """``config.json``. Raises :class:`CheckpointError`."""
        return self._object("config.json")

    def image_settings(self) -> ImageSettings:
        """The image processor's settings. Raises :class:`CheckpointError`; a bad nested file never falls through."""
        nested = self._object(NESTED) if self._has(NESTED) else {}
        if "image_processor" not in nested:
            return self._flat(nested)
        values = nested["image_processor"]
        if not isinstance(values, Mapping):
            raise invalid(NESTED, "image_processor", values, "an object")
        self._note_other(values)
        named = nested.get("processor_class", values.get("processor_class"))
        return ImageSettings(values=values, origin=f"{NESTED} image_processor", processor_class=named)

    def _flat(self, nested: Object) -> ImageSettings:
        values = self._object(FLAT)
        named = nested.get("processor_class", values.get("processor_class"))
        return ImageSettings(values=values, origin=FLAT, processor_class=named)

    def _note_other(self, values: Object) -> None:
        """The nested settings win, as in transformers; two that differ are worth a line in the log."""
        if not self._has(FLAT):
            return
        try:
            flat = self._object(FLAT)
        except CheckpointError as error:
            _log.warning("%s is ignored: %s", FLAT, error)
            return
        if any(flat.get(key) != value for key, value in values.items()):
            _log.warning("%s: %s differs from %s, which wins", self.name, FLAT, NESTED)

    def _has(self, name: str) -> bool:
        return (self.directory / name).exists()

    def _object(self, name: str) -> Object:
        path = self.directory / name
        try:
            value = json.loads(_read(path))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(Reason.CONFIG_UNREADABLE, f"{path}: {error}") from None
        if not isinstance(value, dict):
            raise CheckpointError(Reason.CONFIG_UNREADABLE, f"{path}: {type(value).__name__}, expected an object")
        return value


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """A local directory, or ``repo`` / ``repo@revision`` from the Hugging Face cache, offline.

    Raises :class:`CheckpointError` naming repository, revision and cache where it is not there.
    """
    if isinstance(source, Path) or Path(source).is_dir():
        return _local(Path(source))
    repo, _, pinned = source.partition("@")
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        return _local(Path(source).expanduser())
    revision = revision or pinned or None
    name = f"{repo}@{revision}" if revision else repo
    return Checkpoint(directory=_cached(repo, revision), name=name)


def _local(directory: Path) -> Checkpoint:
    if not directory.is_dir():
        raise CheckpointError(Reason.CHECKPOINT_MISSING, f"{directory} is not a directory")
    return Checkpoint(directory=directory, name=str(directory))


def _cached(repo: str, revision: str | None) -> Path:
    hub = require("huggingface_hub")
    try:
        found = hub.snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=_METADATA)
    except Exception as error:
        where = require("huggingface_hub.constants").HF_HUB_CACHE
        wanted = f"{repo} at revision {revision or 'main'}"
        text = f"{wanted} is not in the cache {where}: download it first ({type(error).__name__})"
        raise CheckpointError(Reason.REVISION_NOT_CACHED, text) from None
    return Path(found)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise ValueError(f"more than {MAX_JSON_BYTES} bytes")
    return raw.decode()
