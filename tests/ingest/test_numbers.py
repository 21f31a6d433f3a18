"""Whatever numbers a broken publisher sends, what kvd says of its stream can still be sent to whoever asks."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core.stream import MOST_MISSING, Policy
from tests.kit.memory import Line
from tests.kit.publisher import chain_of

PROMPT = list(range(100, 116))
LAST = (1 << 64) - 2


@pytest.mark.parametrize("drained", [False, True])
def test_sequences_that_jump_over_everything(drained: bool) -> None:
    line = Line(policy=Policy(drained=drained, conflict_lifetimes=100)).connect()
    for _ in range(4):
        line.publish(chain_of(PROMPT), seq=0)
        line.publish(chain_of(PROMPT), seq=LAST)
    info = line.member.info(0.0)
    assert info.counters["missing"] == MOST_MISSING
    assert info.trust.missing == MOST_MISSING
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info))["last_seq"] == LAST


def test_a_hole_that_is_being_repaired_is_counted_as_far_as_can_be_said() -> None:
    line = Line(replay="inproc://r").connect()
    line.replay_end()
    line.publish(chain_of(PROMPT), seq=0)
    line.publish(chain_of(PROMPT), seq=LAST)
    assert line.trust.reason == "repairing"
    msgspec.msgpack.encode(line.member.info(0.0))
    line.feed.replay_failed("gone")
    line.wait(60)
    assert line.trust.missing == MOST_MISSING
    line.publish(chain_of(PROMPT), seq=5)
    msgspec.msgpack.encode(line.member.info(0.0))
