"""Each cause of a worker that never matches has its sentence, and a healthy worker has none.

The causes are those that users of other routers reported, each of them after a healthy-looking process had answered 0
for days; their reports are named where a test is about one.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.diagnosis import ALL_ANSWERS, ENOUGH_PROMPTS, ONE_IN, Case, Tallies, Tally, diagnose
from kvd.core.score import score
from kvd.core.stream import Policy
from protocols.media import MediaRun
from protocols.plan import Plan, TextPlan, exact_plan
from protocols.query import Finding
from tests.kit.memory import Line
from tests.kit.publisher import chain_of, stored

PROMPT = list(range(100, 116))


class Suspect(Line):
    """A worker-rank with what was asked about it."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.tallies = Tallies()

    def ask(self, plan: Plan, times: int = 1) -> None:
        for _ in range(times):
            self.tallies.note(plan, score(self.fleet, plan, None, self.now))

    def findings(self) -> dict[str, Finding]:
        info = self.member.info(self.now)
        info.counters.update(self.feed.counters)
        case = Case(spec=self.member.spec, info=info, tally=self.tallies.of(self.member.owner))
        return {finding.code: finding for finding in diagnose(case)}

    def only(self, code: str, *, never: bool) -> str:
        findings = self.findings()
        assert list(findings) == [code], findings
        assert findings[code].never == never
        return findings[code].says


def test_a_healthy_worker_has_no_findings() -> None:
    line = Suspect().connect()
    line.publish(chain_of(PROMPT))
    line.ask(exact_plan("m", PROMPT), 50)
    assert line.findings() == {}


def test_nobody_publishes_there() -> None:
    line = Suspect(policy=Policy(connect_timeout=1))
    assert "still being made" in line.only("connecting", never=False)
    line.wait(2)
    assert "bind mode" in line.only("unreachable", never=True)


@pytest.mark.parametrize(("fields", "said"), [({"mode": "bind"}, "no engine has connected"),
                                              ({"source": "trtllm-http"}, "does not answer polls")])  # fmt: skip
def test_nobody_came_or_answered(fields: dict[str, Any], said: str) -> None:
    line = Suspect(policy=Policy(connect_timeout=1), **fields)
    line.wait(2)
    assert said in line.only("unreachable", never=True)


def test_events_are_off() -> None:  # dynamo#4249, dynamo#11984
    line = Suspect(topic="kv").connect()
    said = line.only("no_events", never=False)
    assert "KV events are off" in said
    assert "does not begin with 'kv'" in said


def test_messages_without_sequence_are_no_engine_s_stream() -> None:
    line = Suspect().connect()
    for _ in range(3):
        line.feed.message([b"payload only"])
    assert "3 messages" in line.only("no_sequences", never=True)


def test_messages_of_another_rank() -> None:  # llm-d-router#2229
    line = Suspect().connect()
    line.publish(chain_of(PROMPT), rank=3)
    findings = line.findings()
    assert findings["rank_mismatch"].never
    assert "another data-parallel rank than 0" in findings["rank_mismatch"].says


def test_several_publishers_on_one_endpoint() -> None:  # sglang#29211
    line = Suspect().connect()
    for _ in range(8):
        line.publish(chain_of(PROMPT), seq=5)
        line.publish(chain_of(PROMPT[4:]), seq=0)
    assert line.findings()["several_publishers"].never


def test_a_registered_block_size_that_is_not_the_engine_s() -> None:  # TensorRT-LLM#14882, production-stack#1062
    line = Suspect(block_size=16).connect()
    line.publish(chain_of(PROMPT))
    assert "than the registered 16" in line.only("block_size_mismatch", never=True)


def test_blocks_inflated_beyond_every_prompt() -> None:  # vllm#43258
    line = Suspect().connect()
    line.publish(stored([1], list(range(528)), block_size=528))
    line.ask(exact_plan("m", PROMPT), 3)
    said = line.only("block_size_beyond_prompts", never=True)
    assert "528 tokens and the longest of 3 prompts looked at had 16" in said
    line.ask(exact_plan("m", range(528)))
    assert line.findings() == {}


def test_tokens_that_do_not_divide_into_the_blocks() -> None:
    line = Suspect().connect()
    line.publish(stored([1, 2], PROMPT[:7]))
    assert "none of its 1 stores" in line.only("not_dense", never=True)


def test_stores_without_tokens_only() -> None:
    line = Suspect().connect()
    line.publish(stored([1, 2], [], block_size=0, medium="CPU"))
    assert "hashes and no tokens" in line.only("without_tokens", never=True)


def test_groups_that_hold_no_prefix() -> None:  # llm-d-kv-cache#336, dynamo#12169
    line = Suspect().connect()
    line.publish(stored([1], PROMPT[:4], group_idx=0, kv_cache_spec_kind="cross_attention"))
    line.publish(stored([2], PROMPT[:4], group_idx=3))
    assert "2 events" in line.only("group_kinds", never=True)


def test_blocks_whose_beginning_was_announced_before_kvd_listened() -> None:  # llm-d-kv-cache#372
    line = Suspect().connect()
    line.publish(stored([5], PROMPT[:4], parent=4), seq=0)
    assert "none is linked to the start" in line.only("unlinked", never=False)


def test_a_stream_that_speaks_for_others() -> None:  # Mooncake#2214
    line = Suspect().connect()
    line.publish(chain_of(PROMPT), stored([9], [1, 2, 3, 4], backend_id="node-1"))
    assert "source pool" in line.only("foreign_holder", never=False)


def test_media_nobody_knows() -> None:  # llm-d-router#2808
    line = Suspect().connect()
    line.publish(chain_of(PROMPT), stored([9], [1, 2, 3, 4], medium="tape"))
    assert "media or places" in line.only("unknown_medium", never=False)


def test_media_before_it_is_known_how_they_are_told_apart() -> None:
    line = Suspect().connect()
    line.publish(chain_of(PROMPT))
    line.ask(exact_plan("m", PROMPT, media=[MediaRun(8, 4, "cat")]))
    assert "register scheme" in line.only("scheme_unknown", never=False)


NAMED, HASHED = MediaRun(8, 4, "cat"), MediaRun(8, 4, None, 7)


@pytest.mark.parametrize(
    ("scheme", "named", "lacking"),
    [("media_keys", NAMED, HASHED), ("pad62", HASHED, NAMED), ("pad30", HASHED, NAMED)],
)
def test_identifiers_that_the_worker_s_cache_does_not_go_by(scheme: str, named: MediaRun, lacking: MediaRun) -> None:
    line = Suspect(scheme=scheme).connect()
    line.publish(chain_of(PROMPT))
    line.ask(exact_plan("m", PROMPT, media=[named]))
    assert line.findings() == {}
    line.ask(exact_plan("m", PROMPT, media=[lacking]))
    assert "1 of 2 items" in line.only("identifiers_missing", never=False)
    line = Suspect(scheme=scheme).connect()
    line.publish(chain_of(PROMPT))
    line.ask(exact_plan("m", PROMPT, media=[lacking]))
    line.only("identifiers_missing", never=True)


@pytest.mark.parametrize(
    ("registered", "event", "wrong"),
    [
        ("pad62", stored([1], PROMPT[:4], extra_keys=[[["cat", 0]]]), True),
        ("media_keys", stored([1], [1_000_007] * 4), True),
        ("pad30", stored([1], [1 << 61] * 4), True),
        ("media_keys", stored([1], PROMPT[:4], extra_keys=[[["cat", 0]]]), False),
        ("dynamo", stored([1], [1_000_007] * 4), False),
        ("pad62", stored([1], [1 << 61] * 4), False),
    ],
)
def test_a_registered_scheme_that_is_not_the_engine_s(registered: str, event: dict[str, Any], wrong: bool) -> None:
    line = Suspect(scheme=registered).connect()
    line.publish(event)
    assert list(line.findings()) == (["scheme_mismatch"] if wrong else [])
    assert line.member.info(0.0).scheme == registered


def test_extra_keys_of_uncertain_meaning() -> None:
    line = Suspect().connect()
    line.publish(chain_of(PROMPT), stored([9, 10], PROMPT[:8], extra_keys=[None, ["what"]]))
    assert "1 blocks carry extra keys" in line.only("extra_keys", never=False)


def test_prompts_that_never_match_point_at_template_and_tokenizer() -> None:  # sglang#27386, Infera#143
    line = Suspect().connect()
    line.publish(chain_of(PROMPT))
    other = exact_plan("m", range(500, 516))
    line.ask(other, ENOUGH_PROMPTS - 1)
    assert line.findings() == {}
    line.ask(other)
    assert "chat template" in line.only("never_matched", never=False)
    line.ask(exact_plan("m", PROMPT))
    assert line.findings() == {}


def test_holes_that_cannot_be_filled() -> None:
    line = Suspect().connect()
    line.publish(chain_of(PROMPT))
    line.publish(chain_of(PROMPT), seq=9)
    assert "8 messages are missing" in line.only("no_replay", never=False)


def test_an_event_that_cannot_be_read() -> None:
    line = Suspect().connect()
    line.publish(chain_of(PROMPT), {"type": "BlockStored"})
    assert "bad event" in line.only("incomplete", never=False)


def test_a_polled_engine_that_somebody_else_drains_too() -> None:
    line = Suspect(policy=Policy(drained=True)).connect()
    line.publish(chain_of(PROMPT))
    line.publish(chain_of(PROMPT), seq=3)
    assert "the only one to poll it" in line.only("buffer_overflow", never=False)


def test_the_certain_comes_first() -> None:
    line = Suspect(block_size=16).connect()
    line.publish(chain_of(PROMPT), stored([9], PROMPT[:4], medium="tape"))
    assert [finding.never for finding in line.findings().values()] == [True, False]


def test_later_answers_are_only_sampled() -> None:
    line = Suspect().connect()
    line.publish(chain_of(PROMPT))
    line.ask(exact_plan("m", PROMPT), ALL_ANSWERS + 3 * ONE_IN)
    assert line.tallies.of(("w", 0)).prompts == ALL_ANSWERS + 3
    assert line.tallies.answers == ALL_ANSWERS + 3 * ONE_IN


def test_text_explains_nothing_and_those_who_left_are_forgotten() -> None:
    line = Suspect().connect()
    line.ask(TextPlan(model="m", text="hello", reason="no_tokenizer"))
    assert line.tallies.of(("w", 0)).prompts == 0
    line.ask(exact_plan("m", PROMPT))
    line.tallies.keep([("w", 0)])
    assert line.tallies.of(("w", 0)).prompts == 1
    line.tallies.keep([])
    assert line.tallies.of(("w", 0)).prompts == 0
    assert Tally().prompts == 0
