"""TensorRT-LLM's own stream: vLLM's frames with signed hashes, and strings among the tokens where media are."""

from __future__ import annotations

from typing import Any

from tests.kit.memory import Line
from tests.kit.publisher import cleared, removed, stored

PROMPT = list(range(100, 116))


def streamed(hashes: list[int], tokens: list[Any], *, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    event = stored(hashes, tokens, parent=parent)
    for absent in ("lora_id", "lora_name"):
        del event[absent]
    return event | fields


def test_signed_hashes_are_followed() -> None:
    line = Line().connect()
    line.publish(streamed([-1, -(1 << 63)], PROMPT[:8]))
    line.publish(streamed([7], PROMPT[8:12], parent=-(1 << 63)))
    assert line.score(PROMPT).matched_tokens == 12
    line.publish(removed([-(1 << 63)]))
    assert line.score(PROMPT).matched_tokens == 4
    line.publish(cleared())
    assert line.score(PROMPT).matched_tokens == 0


def test_blocks_with_strings_for_tokens_are_residency_only() -> None:
    line = Line().connect()
    image = "f" * 64
    line.publish(streamed([1], PROMPT[:4]))
    line.publish(streamed([2, 3], [*PROMPT[4:6], image, image, image, *PROMPT[9:12]], parent=1, mm_keys=[[image, 0]]))
    line.publish(streamed([4], PROMPT[12:], parent=3))
    info = line.member.info(0.0)
    assert (info.blocks, info.counters["string_tokens"], line.trust.state) == (4, 1, "exact")
    assert line.score(PROMPT).matched_tokens == 4  # neither the media blocks nor what follows them
    line.publish(removed([2, 3, 4]))
    assert line.member.info(0.0).blocks == 1


def test_a_dropped_batch_leaves_a_hole_that_is_said() -> None:
    line = Line().connect()
    line.publish(streamed([1], PROMPT[:4]))
    line.publish(streamed([2], PROMPT[4:8], parent=1), seq=4)
    assert (line.trust.state, line.trust.missing) == ("incomplete", 3)
    assert line.score(PROMPT).matched_tokens == 8
