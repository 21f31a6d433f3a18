"""ROCm ATOM's stream: ZMQ messages of one frame (payload), two (topic, payload), or three with a sequence.

Without a sequence nobody can tell whether a message was lost, so such a stream is never more than ``incomplete``
(``gaps_undetectable``); kvd numbers its messages itself, from 0 at each connection. That makes a reconnect another
lifetime: nothing else could tell a restarted engine from a network that was away, and old blocks must not be served.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from kvd.core.signals import Message
from kvd.ingest.feed import Feed
from protocols.engine import decode_payload
from protocols.errors import WireError


class AtomFeed(Feed):
    """A feed that numbers what comes without a number."""

    _next = 0

    def connected(self) -> None:
        self._next = 0
        super().connected()

    def message(self, frames: Sequence[bytes]) -> None:
        if len(frames) not in (1, 2):
            super().message(frames)
            return
        topic = frames[0] if len(frames) == 2 else b""
        seq, self._next = self._next, self._next + 1
        self.received(self._numbered(seq, topic, frames[-1]))

    def _numbered(self, seq: int, topic: bytes, payload: bytes) -> Message:
        digest = xxh3_64_intdigest(payload)
        try:
            batch = decode_payload(payload, seq, topic, self._limits)
        except WireError as error:
            return Message(seq=seq, digest=digest, batch=None, fault=error.code, counted=False)
        if batch.rank is not None and batch.rank != self.member.rank:
            self.counters["rank_mismatch"] += 1
            return Message(seq=seq, digest=digest, batch=None, fault="rank_mismatch", counted=False)
        return Message(seq=seq, digest=digest, batch=batch, counted=False)
