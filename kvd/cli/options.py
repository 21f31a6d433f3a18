"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvd.config import Loaded, default_path, load
from protocols.errors import ConfigError

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file; default $CONFIGURATION_DIRECTORY/kvd.toml.")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over file and environment.")]
EndpointOption = Annotated[str | None, typer.Option("--endpoint", "-e", help="Query endpoint of the daemon.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds to wait for the daemon.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def loaded(config: Path | None, overrides: list[str] | None, endpoint: str | None = None) -> Loaded:
    """The configuration in force. Raises :class:`ConfigError`."""
    given = dict(_pair(text) for text in overrides or ())
    if endpoint is not None:
        given["query.endpoint"] = endpoint
    return load(config or default_path(), overrides=given)


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError("--set", text, "section.key=value", origin="command line")
    return name, value


def query_endpoint(endpoint: str | None) -> str:
    """Where the daemon is: as given, else as configured."""
    return endpoint or loaded(None, None).config.endpoint
