"""``kvd``: all commands in one place. Exit codes: 0 ok, 1 a negative answer, 2 usage, 69 unreachable, 78 bad config."""

from __future__ import annotations

import logging
import sys

import typer

from kvd.cli import configuration, offline, planning, queries, watching
from kvd.cli.exits import told
from kvd.cli.options import ConfigOption, EndpointOption, SetOption, loaded
from kvd.config import Config

app = typer.Typer(
    name="kvd", help="Which worker already holds how much of a prompt, how sure that is, and why not.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
app.command("score")(queries.score)
app.command("streams")(queries.streams)
app.command("check")(queries.check)
app.add_typer(queries.workers_app, name="workers")
app.add_typer(configuration.app, name="config")
app.add_typer(planning.app, name="plan")
app.command("decode")(offline.decode)
app.command("evaluate")(offline.evaluate)
app.command("record")(watching.record)


@app.command()
def serve(config: ConfigOption = None, overrides: SetOption = None, endpoint: EndpointOption = None) -> None:
    """Run the daemon."""
    import anyio

    from kvd.daemon import serve as run

    def read() -> Config:
        return loaded(config, overrides, endpoint).config

    with told():
        settings = read()
        logging.basicConfig(
            level=settings.log.level.upper(), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
        )
        anyio.run(run, settings, read)


def main() -> None:
    """The console script."""
    app()
