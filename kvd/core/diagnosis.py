"""Why a worker can never match, in one sentence each: from what its stream showed and what was asked about it.

A worker whose blocks are never matched is the most frequent failure of prefix routing, and every process in it is
healthy. Each rule below looks for one cause of it. Sans-IO: a :class:`Case` goes in, findings come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from kvd.core.residency import DOUBTS
from protocols.plan import ExactPlan, Plan, TextPlan, token_count
from protocols.query import Answer, Finding, StreamInfo, WorkerSpec

ENOUGH_PROMPTS = 20
"""So many prompts without a match are no longer chance."""
ALL_ANSWERS = 1024
ONE_IN = 16
"""The first answers are counted all, later ones only now and then: counting costs 0.5 µs a worker."""


class Asked(msgspec.Struct, frozen=True):
    """One prompt: its tokens, its media items, and how many of those have no identifier, or no 64-bit hash."""

    tokens: int
    media: int
    unnamed: int
    unhashed: int


def _asked(plan: Plan) -> Asked:
    runs = plan.media if isinstance(plan, ExactPlan) else ()
    unnamed = sum(run.identifier is None for run in runs)
    return Asked(token_count(plan), len(runs), unnamed, sum(run.hash64 is None for run in runs))


class Tally:
    """What was asked of one worker-rank, as far as it explains zeros. Media items are counted per prompt."""

    __slots__ = ("longest", "matched", "media", "prompts", "unhashed", "unnamed")

    def __init__(self) -> None:
        self.prompts = 0
        self.matched = 0
        self.longest = 0
        self.media = 0
        self.unnamed = 0
        self.unhashed = 0

    def note(self, asked: Asked, *, matched: bool) -> None:
        """Count one answer."""
        self.prompts += 1
        self.matched += matched
        if asked.tokens > self.longest:
            self.longest = asked.tokens
        if asked.media:
            self.media += asked.media
            self.unnamed += asked.unnamed
            self.unhashed += asked.unhashed


Owner = tuple[str, int]


class Tallies:
    """Tallies by worker-rank. ``answers``: how many were given, of which the later ones are only sampled."""

    def __init__(self) -> None:
        self.answers = 0
        self._tallies: dict[Owner, Tally] = {}

    def note(self, plan: Plan, answer: Answer) -> None:
        """Count an answer for every worker-rank in it; text alone explains nothing. O(media items + workers)."""
        if isinstance(plan, TextPlan):
            return
        self.answers += 1
        if self.answers > ALL_ANSWERS and self.answers % ONE_IN:
            return
        asked = _asked(plan)
        for score in answer.workers:
            owner = score.worker, score.rank
            tally = self._tallies.get(owner)
            if tally is None:
                tally = self._tallies[owner] = Tally()
            tally.note(asked, matched=score.zero_reason is None)

    def of(self, owner: Owner) -> Tally:
        """What was asked of this worker-rank."""
        return self._tallies.get(owner) or Tally()

    def keep(self, owners: Iterable[Owner]) -> None:
        """Forget everybody else. O(tallies)."""
        wanted = set(owners)
        if len(self._tallies) > len(wanted):
            self._tallies = {owner: tally for owner, tally in self._tallies.items() if owner in wanted}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One worker-rank under suspicion."""

    spec: WorkerSpec
    info: StreamInfo
    tally: Tally

    def count(self, *names: str) -> int:
        """How often any of these things happened."""
        return sum(self.info.counters.get(name, 0) for name in names)

    @property
    def heard(self) -> bool:
        return self.info.last_seq is not None

    @property
    def indexed(self) -> bool:
        """Whether any block is tied to tokens."""
        return bool(self.info.block_sizes)


def diagnose(case: Case) -> list[Finding]:
    """What is wrong, the most certain first; empty where nothing is known to be."""
    findings = [finding for rule in _RULES for finding in rule(case)]
    return sorted(findings, key=lambda finding: not finding.never)


Rule = Callable[[Case], Iterator[Finding]]


def _never(code: str, says: str) -> Finding:
    return Finding(code=code, says=says, never=True)


def _doubt(code: str, says: str) -> Finding:
    return Finding(code=code, says=says, never=False)


# --- nothing comes ---------------------------------------------------------------------------------------------------


def _unreachable(case: Case) -> Iterator[Finding]:
    if case.info.trust.reason != "not_connected":
        return
    where = case.info.endpoint
    if case.info.state == "connecting":
        yield _doubt("connecting", f"the connection to {where} is still being made")
    elif case.spec.source == "trtllm-http":
        yield _never("unreachable", f"{where} does not answer polls: wrong URL, or the engine is not up")
    elif case.spec.mode == "bind":
        yield _never("unreachable", f"no engine has connected to {where}: is it the endpoint in the engine's settings?")
    else:
        yield _never(
            "unreachable",
            f"nobody publishes at {where}: wrong host or port, or the engine connects instead of binding (vLLM does "
            "unless its endpoint has * or ::): then add the worker in bind mode",
        )


def _no_events(case: Case) -> Iterator[Finding]:
    info = case.info
    if case.heard or info.trust.reason in ("not_connected", "disconnected", "closed"):
        return
    strange = case.count("frames_frame_count", "frames_seq_len")
    if strange:
        yield _never(
            "no_sequences",
            f"{strange} messages came from {info.endpoint}, none of topic, sequence and payload: this is no engine's "
            "event stream, or one without sequences (add it with source atom)",
        )
        return
    topic = f", or its topic does not begin with {case.spec.topic!r}" if case.spec.topic else ""
    yield _doubt(
        "no_events",
        f"connected to {info.endpoint}, but no event ever came: its KV events are off{topic}, or it has not computed a "
        "prompt of a whole block since (a probe tells)",
    )


def _wrong_rank(case: Case) -> Iterator[Finding]:
    count = case.count("rank_mismatch")
    if count:
        yield _never(
            "rank_mismatch",
            f"{count} messages carry another data-parallel rank than {case.info.rank}: register the worker's first "
            "rank and how many it has",
        )
    if case.count("rank_missing"):
        said = f"{case.count('rank_missing')} events name no rank although {case.spec.ranks} are registered"
        yield _never("rank_missing", f"{said}: the engine has one, so register one")


def _several_publishers(case: Case) -> Iterator[Finding]:
    if case.info.trust.reason == "several_publishers" or case.count("conflicts"):
        yield _never(
            "several_publishers",
            f"several publishers speak at {case.info.endpoint} with counters of their own: give each an endpoint",
        )


# --- what comes cannot be used ---------------------------------------------------------------------------------------


def _block_size(case: Case) -> Iterator[Finding]:
    count = case.count("skipped_block_size_mismatch")
    if count:
        yield _never(
            "block_size_mismatch",
            f"{count} stores have another block size than the registered {case.spec.block_size}: leave block_size out, "
            "or give what the engine uses (hybrid models choose their own)",
        )
    if case.count("block_size_varies"):
        said = f"blocks come in more sizes than are told apart ({case.info.block_sizes} are known)"
        yield _doubt("block_size_varies", f"{said}; the others are not matched")


def _inflated(case: Case) -> Iterator[Finding]:
    smallest = min(case.info.block_sizes, default=0)
    if case.tally.prompts and case.tally.longest < smallest:
        yield _never(
            "block_size_beyond_prompts",
            f"its blocks hold {smallest} tokens and the longest of {case.tally.prompts} prompts looked at had "
            f"{case.tally.longest}: prompts shorter than a block are never cached as a prefix",
        )


def _density(case: Case) -> Iterator[Finding]:
    if case.indexed:
        return
    untied = case.count("not_dense", "string_tokens")
    if untied:
        yield _never(
            "not_dense",
            f"none of its {untied} stores has block size times blocks tokens, so no block can be tied "
            "to its tokens (string tokens, offloaded chunks or masked groups only)",
        )
    elif case.count("without_tokens"):
        said = f"its {case.count('without_tokens')} stores carry hashes and no tokens"
        yield _never("without_tokens", f"{said}: only a connector speaks here, not the engine's own cache")


def _groups(case: Case) -> Iterator[Finding]:
    skipped = case.count("skipped_group_kind", "skipped_unlearned_group", "skipped_too_many_groups")
    if skipped and not case.indexed:
        yield _never(
            "group_kinds",
            f"{skipped} events are all of KV-cache groups that cannot be indexed: no full or MLA attention group was "
            "announced",
        )


def _unlinked(case: Case) -> Iterator[Finding]:
    explained = ("not_dense", "string_tokens", "without_tokens", "skipped_block_size_mismatch", "ambiguous_extra_keys")
    if case.info.blocks and not case.indexed and not case.count(*explained):
        yield _doubt(
            "unlinked",
            f"{case.info.blocks} blocks are held, but none is linked to the start of a prompt: their parents were "
            "announced before kvd listened (a replay endpoint brings them)",
        )


def _places(case: Case) -> Iterator[Finding]:
    if case.count("skipped_foreign_holder"):
        said = f"{case.count('skipped_foreign_holder')} events speak for other holders"
        yield _doubt("foreign_holder", f"{said}: this is a pool's stream (add it with source pool)")
    if case.count("skipped_unknown_medium", "skipped_not_local"):
        said = f"{case.count('skipped_unknown_medium', 'skipped_not_local')} events name media or places kvd does not"
        yield _doubt("unknown_medium", f"{said} know; they are not scored")
    if case.count("skipped_foreign_model"):
        said = f"{case.count('skipped_foreign_model')} events are of other models than {case.spec.model!r}"
        yield _doubt("foreign_model", f"{said}: the names must be equal")
    if case.count("skipped_too_many_holders"):
        said = f"{case.count('skipped_too_many_holders')} events are of holders beyond the bound"
        yield _doubt("too_many_holders", f"{said}; they are not scored")


# --- keys differ -----------------------------------------------------------------------------------------------------


def _media(case: Case) -> Iterator[Finding]:
    tally, scheme = case.tally, case.info.scheme
    if not tally.media:
        return
    if scheme is None:
        yield _doubt(
            "scheme_unknown",
            f"{tally.media} media items were asked about, and how this worker tells media apart is not known yet: "
            "matches end before them (register scheme)",
        )
    elif scheme == "media_keys" and tally.unnamed:
        yield _identity(tally.unnamed, tally, "its cache names media by identifier", "no identifier")
    elif scheme != "media_keys" and tally.unhashed:
        yield _identity(tally.unhashed, tally, f"its cache ({scheme}) names media by a 64-bit hash", "no such hash")


def _identity(lacking: int, tally: Tally, how: str, what: str) -> Finding:
    said = f"{how}, and {lacking} of {tally.media} items asked about have {what}: matches end before them"
    return Finding(code="identifiers_missing", says=said, never=lacking == tally.media)


def _scheme(case: Case) -> Iterator[Finding]:
    if case.count("scheme_mismatch"):
        yield _doubt(
            "scheme_mismatch",
            f"its events tell media apart otherwise than the registered {case.spec.scheme}: no prompt with media can "
            "match past its first item (leave scheme out, or give the one of its version)",
        )


def _extra_keys(case: Case) -> Iterator[Finding]:
    count = case.count("ambiguous_extra_keys", "ambiguous_namespace", "media_unreadable")
    if count:
        yield _doubt(
            "extra_keys",
            f"{count} blocks carry extra keys whose meaning is not certain (media without offsets, a salt in the "
            "middle of a prompt): neither they nor what follows them is matched",
        )


def _never_matched(case: Case) -> Iterator[Finding]:
    tally = case.tally
    long_enough = tally.longest >= min(case.info.block_sizes, default=0)
    if tally.prompts >= ENOUGH_PROMPTS and not tally.matched and case.indexed and case.info.blocks and long_enough:
        yield _doubt(
            "never_matched",
            f"none of {tally.prompts} prompts looked at matched even one of its {case.info.blocks} blocks: they are "
            "keyed otherwise than the engine sees them (chat template, tokenizer, adapter or salt), or all new to it",
        )


# --- what is missing -------------------------------------------------------------------------------------------------


def _incomplete(case: Case) -> Iterator[Finding]:
    reason, missing = case.info.trust.reason, case.info.trust.missing
    if reason in ("no_replay_endpoint", "reconnect_unproven"):
        yield _doubt("no_replay", f"{missing} messages are missing and cannot be had again: give it a replay endpoint")
    elif reason == "buffer_overflow":
        yield _doubt(
            "buffer_overflow",
            f"{missing} events were lost to the engine's buffer or to another reader, and what was known went with "
            "them: kvd must be the only one to poll it, and often enough",
        )
    elif reason == "gaps_undetectable":
        yield _doubt("gaps_undetectable", "its messages carry no sequence, so nobody can tell whether one was lost")
    elif case.info.trust.state == "incomplete" and reason not in DOUBTS:  # those have findings of their own
        yield _doubt("incomplete", f"the stream is incomplete ({reason.replace('_', ' ')}, {missing} messages missing)")
    if case.count("skipped_index_full"):
        yield _doubt("index_full", "the index is full, and stores of this worker were refused: raise index.max_blocks")


_RULES: tuple[Rule, ...] = (
    _unreachable, _no_events, _wrong_rank, _several_publishers, _block_size, _inflated, _density, _groups, _unlinked,
    _places, _scheme, _media, _extra_keys, _never_matched, _incomplete,
)  # fmt: skip
