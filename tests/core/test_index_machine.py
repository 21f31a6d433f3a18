"""Every implementation of the index against the naive model, step by step.

Blocks are two tokens of a tiny alphabet, so that ranks share content, hashes are reused, and parents come late.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from xxhash import xxh3_64_intdigest

from kvd.core.residency import Bounds
from protocols.events import BlockExtra, Cleared, Removed, Stored, Tier
from protocols.keys import plan_keys
from protocols.media import MediaRun
from protocols.plan import exact_plan
from tests.kit.conformance import FACTORIES, TIGHT, IndexFactory
from tests.kit.model import Chain, Rank

SIZE = 2
IMAGES = {3: "a1", 4: "a2"}
"""Block kinds 3 and 4 are images of the same placeholder tokens; 1 and 2 are text."""
SPACES = [(None, None), ("lora", None), (None, "salt"), ("lora", "salt")]
SPECS = {0: ("mamba", None), 1: ("full_attention", None), 2: ("sliding_window", 4)}

kinds = st.integers(1, 4)
spaces = st.sampled_from(SPACES)
media = st.sampled_from([None, "GPU", "GPU", "host", "nvme"])
small_hashes = st.integers(1, 8)
ranks = st.integers(0, 2)


def tokens_of(kind: int) -> tuple[int, int]:
    return (9, 9) if kind in IMAGES else (kind, 7)


def extra_of(kind: int) -> BlockExtra | None:
    return BlockExtra(media=((IMAGES[kind], 0),)) if kind in IMAGES else None


def content(kind: int) -> tuple[Any, ...]:
    return tokens_of(kind), ((IMAGES[kind], 0),) if kind in IMAGES else (), ()


def event_of(hashes: list[int], parent: int | None, blocks: list[int], **fields: Any) -> Stored:
    return Stored(
        hashes=tuple(hashes), parent=parent, tokens=[t for kind in blocks for t in tokens_of(kind)], block_size=SIZE,
        dense=True, extra=tuple(map(extra_of, blocks)) if any(b in IMAGES for b in blocks) else None, **fields,
    )  # fmt: skip


class IndexMachine(RuleBasedStateMachine):
    """Ranks in the index by position; each has its own hash function, as two engines have."""

    factory: IndexFactory
    bounds: Bounds | None = None

    def __init__(self) -> None:
        super().__init__()
        self.index = self.factory(max_blocks=100_000)
        self.models: dict[int, Rank] = {}
        self.handles: dict[int, int] = {}
        self.seen: set[Chain] = set()

    @initialize()
    def begin(self) -> None:
        for position in range(3):
            self._add(position)

    def _add(self, position: int) -> None:
        self.handles[position] = self.index.add_rank(bounds=self.bounds)
        self.models[position] = Rank()

    def _apply(self, position: int, event: Stored | Removed | Cleared) -> None:
        self.index.apply(self.handles[position], event)
        self.models[position].apply(event)
        self.seen |= set(self.models[position].chains.values())

    @staticmethod
    def _hash(position: int, copy: int, chain: tuple[Any, ...]) -> int:
        """What an engine would call this block; ``copy`` 1 is the same content under a second name."""
        return xxh3_64_intdigest(repr((position % 2, copy, chain)).encode())

    # --- a well-behaved engine ---

    @rule(
        position=ranks, space=spaces, blocks=st.lists(kinds, min_size=1, max_size=5), start=st.integers(0, 4),
        medium=media, copy=st.integers(0, 1),
    )  # fmt: skip
    def store(self, position: int, space: Any, blocks: list[int], start: int, medium: str | None, copy: int) -> None:
        """A span of a sequence: from its beginning, extending what is there, or with a parent never announced."""
        start = min(start, len(blocks) - 1)
        names = [self._hash(position, copy, (space, *blocks[: i + 1])) for i in range(len(blocks))]
        parent = self._hash(position, 0, (space, *blocks[:start])) if start else None
        lora, salt = space
        event = event_of(
            names[start:], parent, blocks[start:], medium=medium, lora_name=lora,
            cache_salt=salt if not start or copy else None,
        )  # fmt: skip
        self._apply(position, event)

    @rule(position=ranks, data=st.data(), medium=media)
    def remove(self, position: int, data: st.DataObject, medium: str | None) -> None:
        """Any of the hashes that are known, in any order: tails, middles, and what is not there."""
        known = sorted({hash_ for _, _, hash_ in self.models[position].copies}) or [1]
        hashes = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
        self._apply(position, Removed(hashes=tuple(hashes), medium=medium))

    @rule(position=ranks, data=st.data(), medium=st.sampled_from(["host", "nvme", "GPU"]))
    def offload(self, position: int, data: st.DataObject, medium: str) -> None:
        known = sorted(self.models[position].chains) or [1]
        hashes = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
        self._apply(position, Stored(hashes=tuple(hashes), parent=None, tokens=[], block_size=0, medium=medium))

    @rule(position=ranks, medium=st.sampled_from([None, None, "GPU", "host", "nvme"]))
    def clear(self, position: int, medium: str | None) -> None:
        self._apply(position, Cleared(medium=medium))

    @rule(position=ranks)
    def restart(self, position: int) -> None:
        self.index.clear_rank(self.handles[position])
        self.models[position] = Rank()

    @rule(position=ranks)
    def replace(self, position: int) -> None:
        self.index.remove_rank(self.handles[position])
        self._add(position)

    @rule(limit=st.integers(1, 4))
    def sweep(self, limit: int) -> None:
        self.index.sweep(limit)

    # --- after every step ---

    @invariant()
    def sound(self) -> None:
        assert self.index.check() == []

    def _prompt(self, chain: Chain) -> Any:
        tokens: list[int] = []
        runs: list[MediaRun] = []
        for words, items, _ in chain[1:]:
            runs += [MediaRun(len(tokens), SIZE, identifier) for identifier, _ in items]
            tokens += words
        lora, salt = chain[0]
        return plan_keys(exact_plan("m", tokens, media=runs, lora_name=lora, cache_salt=salt), SIZE, "media_keys")

    def _compare(self, chain: Chain) -> None:
        found = self.index.match(self._prompt(chain), self.handles.values())
        for position, model in self.models.items():
            reach = found.get(self.handles[position])
            claimed = (0, 0, 0, 0) if reach is None else reach.tiers
            self.judge(chain, claimed, tuple(model.reach(chain, tier) for tier in Tier))
            usable = 0 if reach is None else reach.usable
            self.judge(chain, (usable,), (model.usable(chain, SIZE),))

    @staticmethod
    def judge(chain: Chain, claimed: tuple[int, ...], true: tuple[int, ...]) -> None:
        assert claimed == true, f"{chain}: index says {claimed}, the model {true}"

    @invariant()
    def same_reach_as_the_model(self) -> None:
        longest = [c for c in self.seen if not any(len(d) == len(c) + 1 and d[:-1] == c for d in self.seen)]
        for chain in sorted(longest, key=repr)[:24]:
            self._compare(chain)

    @rule(space=spaces, blocks=st.lists(kinds, min_size=1, max_size=6))
    def ask(self, space: Any, blocks: list[int]) -> None:
        self._compare((space, *map(content, blocks)))


class AdversarialMachine(IndexMachine):
    """As above, and engines whose hashes mean whatever comes next: reused, their own ancestors, in circles."""

    @rule(
        position=ranks, hashes=st.lists(small_hashes, min_size=1, max_size=4), parent=st.none() | small_hashes,
        data=st.data(), medium=media,
    )  # fmt: skip
    def store_anything(
        self, position: int, hashes: list[int], parent: int | None, data: st.DataObject, medium: str | None
    ) -> None:
        blocks = data.draw(st.lists(kinds, min_size=len(hashes), max_size=len(hashes)))
        self._apply(position, event_of(hashes, parent, blocks, medium=medium))


class BoundedMachine(IndexMachine):
    """With tight bounds an implementation forgets; it may then say less than the truth, never more."""

    bounds = TIGHT

    @rule(limit=st.integers(1, 3))
    def make_room(self, limit: int) -> None:
        self.index.forget_unlinked(limit)

    @staticmethod
    def judge(chain: Chain, claimed: tuple[int, ...], true: tuple[int, ...]) -> None:
        assert all(c <= t for c, t in zip(claimed, true, strict=True)), f"{chain}: claims {claimed} of {true}"


class HybridMachine(IndexMachine):
    """Attention, recurrent and sliding-window groups that share hashes."""

    @initialize()
    def begin(self) -> None:
        super().begin()
        for position, (group, (spec, window)) in itertools.product(range(3), SPECS.items()):
            self._apply(
                position,
                Stored(
                    hashes=(), parent=None, tokens=[], block_size=SIZE, group=group, spec_kind=spec,
                    sliding_window=window,
                ),
            )  # fmt: skip

    @rule(position=ranks, data=st.data(), group=st.sampled_from([0, 2]), medium=media)
    def store_state(self, position: int, data: st.DataObject, group: int, medium: str | None) -> None:
        known = sorted(self.models[position].chains) or [1]
        hashes = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
        spec, window = SPECS[group]
        event = Stored(
            hashes=tuple(hashes), parent=None, tokens=[1] * 8, block_size=SIZE, group=group, spec_kind=spec,
            sliding_window=window, medium=medium,
        )  # fmt: skip
        self._apply(position, event)

    @rule(position=ranks, data=st.data(), group=st.sampled_from([0, 1, 2]), medium=media)
    def remove_state(self, position: int, data: st.DataObject, group: int, medium: str | None) -> None:
        known = sorted({hash_ for _, _, hash_ in self.models[position].copies}) or [1]
        hashes = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
        self._apply(position, Removed(hashes=tuple(hashes), medium=medium, group=group))

    def restart(self, position: int = 0) -> None:
        """Groups are learnt per lifetime: restarts are the other machines' business."""

    def replace(self, position: int = 0) -> None:
        """See ``restart``."""


EXAMPLES = {"plain": 120, "adversarial": 250, "bounded": 100, "hybrid": 100}
MACHINES: dict[str, type[IndexMachine]] = {
    "plain": IndexMachine, "adversarial": AdversarialMachine, "bounded": BoundedMachine, "hybrid": HybridMachine,
}  # fmt: skip


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("machine", MACHINES)
def test_index_agrees_with_the_model(name: str, machine: str) -> None:
    kind = type(f"{machine}_{name}", (MACHINES[machine],), {"factory": staticmethod(FACTORIES[name])})
    case = kind.TestCase
    case.settings = settings(
        max_examples=EXAMPLES[machine], stateful_step_count=30, deadline=None, print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case("runTest").runTest()
