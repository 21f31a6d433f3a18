"""``kvd record``: a live stream written down, message by message, as it was received."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Annotated

import typer
import zmq

from kvd.cli.exits import told
from kvd.ingest.recording import write_line
from kvd.ingest.zmq import ZmqOptions, ZmqTransport
from kvd.sockets import Pump


class _Recorder:
    """A sink that writes live messages to a file and stops after ``count``."""

    def __init__(self, file: IO[bytes], endpoint: str, count: int | None) -> None:
        self.written = 0
        self.done = asyncio.Event()
        self._file = file
        self._endpoint = endpoint
        self._count = count

    def message(self, frames: Sequence[bytes]) -> None:
        if self.done.is_set():
            return
        write_line(self._file, time.time(), self._endpoint, frames)
        self._file.flush()
        self.written += 1
        if self.written == self._count:
            self.done.set()

    def connected(self) -> None:
        typer.echo(f"connected to {self._endpoint}", err=True)

    def disconnected(self) -> None:
        typer.echo(f"lost {self._endpoint}", err=True)

    def replayed(self, frames: Sequence[bytes]) -> None:
        """Replays are not asked for here."""

    def replay_failed(self, reason: str) -> None:
        """Replays are not asked for here."""


def record(
    events: Annotated[str, typer.Argument(help="Where the engine publishes: tcp://host:port, ipc://path.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to append to.")],
    bind: Annotated[bool, typer.Option("--bind", help="The engine connects; bind here.")] = False,
    topic: Annotated[str, typer.Option(help="Topic prefix.")] = "",
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many messages.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="Stop after this long.")] = None,
) -> None:
    """Write a stream down until interrupted, or for so many messages or seconds."""
    with told(), output.open("ab") as file:
        written = asyncio.run(_record(file, events, bind, topic, count, seconds))
    typer.echo(f"{written} messages written to {output}", err=True)


async def _record(
    file: IO[bytes], endpoint: str, bind: bool, topic: str, count: int | None, seconds: float | None
) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pump = Pump()
    transport = ZmqTransport(
        context, pump, endpoint=endpoint, replay=None, bind=bind, topic=topic.encode(), options=ZmqOptions()
    )
    recorder = _Recorder(file, endpoint, count)
    try:
        transport.open(recorder)
        async with asyncio.timeout(seconds):
            await recorder.done.wait()
    except (TimeoutError, asyncio.CancelledError):
        pass
    finally:
        transport.close()
        pump.close()
        context.term()
    return recorder.written
