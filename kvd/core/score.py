"""A plan against the fleet: for every worker how much it holds, how sure that is, and why it is zero.

The plan is hashed once per distinct (block size, EAGLE, scheme) among the workers asked about.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import msgspec

from kvd.core.fleet import Fleet, Member
from kvd.core.reference import Reach
from kvd.core.residency import MEDIA_DOUBTS
from kvd.core.routed import TEXT_CHUNK_BYTES, text_keys
from kvd.core.tree import KeySequence, Window
from protocols.keys import plan_keys
from protocols.media import Scheme
from protocols.plan import Basis, ExactPlan, Plan, PrefixPlan, TextPlan, basis_of, token_count
from protocols.query import TIER_NAMES, Answer, Trust, WorkerScore, ZeroReason

Variant = tuple[Window, Scheme | None]
_NOTHING = Reach((0, 0, 0, 0), 0)


class Asked(msgspec.Struct, frozen=True):
    """What zero reasons need to know of a prompt."""

    prompt_tokens: int
    has_media: bool


class Overlap:
    """The best a worker offers over the ways its blocks are cut: reach, block size, and the keys it was found by."""

    __slots__ = ("block_size", "keys", "reach")

    def __init__(self) -> None:
        self.reach = _NOTHING
        self.block_size: int | None = None
        self.keys: KeySequence = ()

    def tokens(self) -> list[int]:
        """Tokens per tier, cumulative."""
        return [blocks * (self.block_size or 0) for blocks in self.reach.tiers]

    def offer(self, reach: Reach, block_size: int, keys: KeySequence) -> None:
        """Take this cut if it reaches further, nearest tier first."""
        if self.block_size is None or [blocks * block_size for blocks in reach.tiers] > self.tokens():
            self.reach, self.block_size, self.keys = reach, block_size, keys


def score(fleet: Fleet, plan: Plan, workers: Sequence[str] | None, now: float) -> Answer:
    """One plan's answer. O(variants × match + workers)."""
    members = fleet.of_model(plan.model, workers)
    if isinstance(plan, TextPlan):
        scores = [_text_score(fleet, plan, member, now) for member in members]
    else:
        overlaps = _overlaps(plan, members)
        asked = Asked(token_count(plan), isinstance(plan, ExactPlan) and bool(plan.media))
        scores = [_worker_score(fleet, asked, member, overlaps[member.owner], now) for member in members]
    return _answer(fleet, plan.model, basis_of(plan), token_count(plan), scores)


def score_keys(
    fleet: Fleet, model: str, keys: bytes, block_size: int, workers: Sequence[str] | None, now: float
) -> Answer:
    """The same from keys computed elsewhere, packed u64 little-endian."""
    members = fleet.of_model(model, workers)
    unpacked = struct.unpack(f"<{len(keys) // 8}Q", keys)
    overlaps = {member.owner: Overlap() for member in members}
    matching = [m for m in members if any(size == block_size for size, _ in m.index.windows(m.handle))]
    _match(matching, unpacked, block_size, overlaps)
    asked = Asked(len(unpacked) * block_size, has_media=False)
    scores = [_worker_score(fleet, asked, member, overlaps[member.owner], now) for member in members]
    return _answer(fleet, model, "exact", asked.prompt_tokens, scores)


def _answer(fleet: Fleet, model: str, basis: Basis, prompt_tokens: int, scores: list[WorkerScore]) -> Answer:
    unknown = all(spec.model != model for spec in fleet.workers.values())
    return Answer(
        model=model, basis=basis, prompt_tokens=prompt_tokens, workers=scores,
        zero_reason="unknown_model" if unknown else None,
    )  # fmt: skip


def _overlaps(plan: ExactPlan | PrefixPlan, members: Sequence[Member]) -> dict[tuple[str, int], Overlap]:
    groups: dict[Variant, list[Member]] = {}
    for member in members:
        for window in member.index.windows(member.handle):
            groups.setdefault((window, member.index.scheme(member.handle)), []).append(member)
    overlaps = {member.owner: Overlap() for member in members}
    keyed: dict[Variant, KeySequence] = {}
    for (window, scheme), group in groups.items():
        variant = (window, scheme if isinstance(plan, ExactPlan) and plan.media else None)
        if variant not in keyed:
            keyed[variant] = plan_keys(plan, window[0], variant[1], eagle=window[1])
        _match(group, keyed[variant], window[0], overlaps)
    return overlaps


def _match(
    members: Iterable[Member], keys: KeySequence, block_size: int, overlaps: dict[tuple[str, int], Overlap]
) -> None:
    handles = {member.handle: member for member in members}
    if not handles:
        return
    index = next(iter(handles.values())).index
    reached = index.match(keys, handles)
    for handle, member in handles.items():
        overlaps[member.owner].offer(reached.get(handle, _NOTHING), block_size, keys)


def _worker_score(fleet: Fleet, asked: Asked, member: Member, overlap: Overlap, now: float) -> WorkerScore:
    size = overlap.block_size or 0
    trust = member.stream.trust(now)
    tiers = dict(zip(TIER_NAMES, overlap.tokens(), strict=True))
    return WorkerScore(
        worker=member.spec.name, rank=member.rank, block_size=overlap.block_size, trust=trust,
        matched_blocks=overlap.reach.tiers[0], matched_tokens=tiers["device"], tier_tokens=tiers,
        usable_tokens=overlap.reach.usable * size, predicted_tokens=_predicted(fleet, member, overlap, now) * size,
        zero_reason=None if overlap.reach.tiers[-1] else _zero_reason(asked, member, overlap, trust),
    )  # fmt: skip


def _predicted(fleet: Fleet, member: Member, overlap: Overlap, now: float) -> int:
    if not len(fleet.routed):
        return 0
    keys = overlap.keys
    return fleet.routed.reach(member.owner, (keys[i] for i in range(len(keys))), now)


def _zero_reason(asked: Asked, member: Member, overlap: Overlap, trust: Trust) -> ZeroReason:
    counters = member.index.counters(member.handle)
    if overlap.block_size is None:  # nothing of this lifetime was ever indexed
        cut_otherwise = bool(member.index.windows(member.handle))  # only keys computed elsewhere meet this
        if cut_otherwise or "skipped_block_size_mismatch" in member.index.counters(member.handle):
            return "block_size_mismatch"
        if trust.state == "incomplete":
            return "incomplete"
        return "no_events_yet" if member.stream.last is None else "no_match"
    if asked.prompt_tokens < overlap.block_size:
        return "shorter_than_block"
    if asked.has_media and (not len(overlap.keys) or any(map(counters.get, MEDIA_DOUBTS))):
        return "scheme_unknown"
    return "incomplete" if trust.state == "incomplete" else "no_match"


def _text_score(fleet: Fleet, plan: TextPlan, member: Member, now: float) -> WorkerScore:
    keys = text_keys(plan.model, plan.text, plan.lora_name, plan.cache_salt)
    chunks = fleet.routed.reach(member.owner, keys, now)
    return WorkerScore(
        worker=member.spec.name, rank=member.rank, block_size=None, matched_blocks=0, matched_tokens=0,
        usable_tokens=0, tier_tokens=dict.fromkeys(TIER_NAMES, 0), trust=member.stream.trust(now),
        predicted_bytes=chunks * TEXT_CHUNK_BYTES, zero_reason=None if chunks else "no_routes_yet",
    )  # fmt: skip


def routed_keys(plan: Plan, member: Member) -> list[int]:
    """The keys under which a routed plan is predicted for this member; none while its block size is unknown."""
    if isinstance(plan, TextPlan):
        return text_keys(plan.model, plan.text, plan.lora_name, plan.cache_salt)
    keys: list[int] = []
    for size, eagle in member.index.windows(member.handle):
        keys += plan_keys(plan, size, member.index.scheme(member.handle), eagle=eagle)
    return keys
