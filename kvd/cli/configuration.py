"""``kvd config``: what is set, from where, and whether it can be used."""

from __future__ import annotations

import msgspec
import typer
from rich.table import Table

from kvd.cli.exits import told
from kvd.cli.options import ConfigOption, JsonOption, SetOption, loaded
from kvd.cli.tables import console, print_json
from kvd.config import settings

app = typer.Typer(help="The configuration in force.", no_args_is_help=True)


@app.command()
def check(config: ConfigOption = None, overrides: SetOption = None) -> None:
    """Exit 0 if the configuration can be used, 78 with file, key, value and remedy if not."""
    with told():
        found = loaded(config, overrides)
    print(f"ok: {len(found.config.workers)} workers, query endpoint {found.config.endpoint}")


@app.command()
def show(
    config: ConfigOption = None,
    overrides: SetOption = None,
    origin: bool = typer.Option(False, "--origin", help="Where each value comes from."),
    as_json: JsonOption = False,
) -> None:
    """Every setting with its value and what it is for."""
    with told():
        found = loaded(config, overrides)
    rows = []
    for setting in settings():
        value = getattr(getattr(found.config, setting.section), setting.key)
        rows.append({"name": setting.name, "value": value, "env": setting.env, "origin": found.origins[setting.name],
                     "description": setting.description})  # fmt: skip
    if as_json:
        print_json({"settings": rows, "workers": msgspec.to_builtins(found.config.workers)})
        return
    table = Table("setting", "value", *(("origin",) if origin else ()), "environment", "what it is")
    for row in rows:
        where = (row["origin"],) if origin else ()
        table.add_row(row["name"], str(row["value"]), *where, row["env"], row["description"])
    console().print(table)
