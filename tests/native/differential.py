"""Random histories driven through the reference and another implementation side by side; every answer must be the same.

``python -m tests.native.differential --histories 5000 --seed 1`` runs a long campaign and prints the seed that fails.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Callable
from typing import Any

import msgspec

from kvd.core.image import Blocks, Head, Nodes, Tracked
from kvd.core.reference import ReferenceIndex
from kvd.core.residency import Bounds, Budget
from protocols.events import Bad, BlockExtra, Cleared, Event, Removed, Stored, Unknown
from protocols.keys import plan_keys, token_keys
from protocols.media import MediaRun
from protocols.plan import exact_plan

MEDIA = [None, None, None, None, "GPU", "cpu", "CPU", "STORAGE", "nvme", "OBJ", "shared", "nowhere"]
SPACES = [(None, None), (None, None), ("lora", None), (None, "salt"), ("lora", "salt")]
GROUPS: list[dict[str, Any]] = [
    {}, {}, {}, {"group": 0, "spec_kind": "full_attention"}, {"group": 1, "spec_kind": "mamba"},
    {"group": 2, "spec_kind": "sliding_window", "sliding_window": 5}, {"group": 3, "spec_kind": "mla_attention"},
    {"group": 4, "spec_kind": "odd"}, {"group": 5},
]  # fmt: skip
WIDE = 1 << 40
_parts = msgspec.msgpack.Decoder(Head | Nodes | Blocks | Tracked)


class History:
    """One history. Whatever is random comes from ``rng``, so that a seed tells it all."""

    def __init__(self, rng: random.Random, other: Callable[..., Any]) -> None:
        self.rng = rng
        limit = rng.choice([40, 400, 1 << 20])
        self.budgets = [Budget(limit), Budget(limit)]
        self.indexes = [ReferenceIndex(budget=self.budgets[0]), other(budget=self.budgets[1])]
        self.handles: list[int] = []
        self.prompts: list[list[int]] = [[1, 7]]
        self.names = rng.choice([8, 60, 1000, 1 << 62])
        self.recent: list[int] = [1]
        self.alphabet = rng.choice([2, 3, 6])
        self.hybrid = rng.random() < 0.3
        self.offloads = rng.random() < 0.6
        self.sizes = [2] if rng.random() < 0.7 else list(range(1, 20))
        self.add()

    def add(self) -> None:
        rng = self.rng
        bounds = rng.choice([None, Bounds(unlinked=3, remembered=3), Bounds(unlinked=9, remembered=1, block_sizes=40)])
        fields = {
            "block_size": rng.choice([None, None, None, 2]), "bounds": bounds, "single_copies": rng.random() < 0.1,
            "scheme": rng.choice([None, None, "pad30", "dynamo", "media_keys"]),
        }  # fmt: skip
        self.handles.append(self.both(lambda index: index.add_rank(**fields)))

    def both(self, ask: Callable[[Any], Any]) -> Any:
        """The same answer, or the same kind of error, from both."""
        answers = [_outcome(ask, index) for index in self.indexes]
        assert answers[0] == answers[1], f"reference: {answers[0]}; other: {answers[1]}"
        return answers[0]

    # --- events ---

    def tokens(self, blocks: int, size: int, *, eagle: bool) -> list[int]:
        """Tokens for some blocks, mostly the beginning of something known and its continuation."""
        rng = self.rng
        known = rng.choice(self.prompts)
        tokens = known[: rng.randint(0, len(known)) // size * size]
        while len(tokens) < blocks * size + eagle:
            tokens.append(rng.randint(1, self.alphabet))
        if rng.random() < 0.04:
            tokens[rng.randrange(len(tokens))] = rng.choice([WIDE, 1_000_000 + 5])
        self.prompts.append(tokens)
        if len(self.prompts) > 40:
            self.prompts.pop(rng.randrange(len(self.prompts)))
        return tokens

    def stored(self) -> Stored:
        rng = self.rng
        size, eagle = rng.choice(self.sizes), rng.random() < 0.1
        total = rng.choice([1, 2, 3, 5, 12])
        tokens = self.tokens(total, size, eagle=eagle)
        total = (len(tokens) - eagle) // size
        first = rng.choice([0, 0, rng.randint(0, total - 1)])
        space = rng.choice(SPACES)
        if rng.random() < 0.85:  # an engine whose hashes follow the content
            names = [_engine_hash(space, tokens[: (i + 1) * size]) % self.names + 1 for i in range(total)]
        else:
            names = [rng.choice([*self.recent, rng.randint(1, self.names)]) for _ in range(total)]
        parent = names[first - 1] if first else rng.choice([None, None, None, 0, rng.choice(self.recent)])
        self.recent = [*self.recent, *names][-200:]
        told = tokens[first * size : total * size + eagle]
        count = total - first
        fields: dict[str, Any] = {"dense": True, "lora_name": space[0], "cache_salt": space[1]}
        if rng.random() < 0.1:
            fields["extra"] = tuple(self.extra() for _ in range(count + (rng.random() < 0.05)))
        if rng.random() < 0.05:
            fields |= {"dense": False, "warn": rng.choice([(), ("string_token",)])}
        if rng.random() < 0.03:
            told = []
        if rng.random() < 0.02:
            fields |= rng.choice([{"locality": "remote"}, {"backend_id": "b"}, {"lora_id": 3, "lora_name": None}])
        if self.hybrid:
            fields |= rng.choice(GROUPS)
        medium = rng.choice(MEDIA) if self.offloads else None
        return Stored(
            hashes=tuple(names[first:]), parent=parent, tokens=list(told), block_size=size, eagle=eagle, medium=medium,
            **fields,
        )  # fmt: skip

    def extra(self) -> BlockExtra | None:
        rng = self.rng
        return rng.choice([
            None, BlockExtra(media=(("a", 0),)), BlockExtra(media=(("a", -2), ("b", 1))), BlockExtra(strings=("s",)),
            BlockExtra(digests=("ab" * 32,)),
        ])  # fmt: skip

    def event(self) -> Event:
        rng = self.rng
        kind = rng.random()
        medium = rng.choice(MEDIA) if self.offloads else None
        if kind < 0.55:
            return self.stored()
        hashes = tuple(rng.choice(self.recent) for _ in range(rng.choice([1, 1, 2, 8])))
        if kind < 0.63:
            return Stored(hashes=hashes, parent=None, tokens=[], block_size=0, medium=medium)
        if kind < 0.96:
            return Removed(hashes=hashes, medium=medium, group=rng.choice(GROUPS).get("group") if self.hybrid else None)
        if kind < 0.98:
            return Cleared(medium=medium, tenant_id=rng.choice([None, None, "t"]))
        return rng.choice([Unknown("Whatever"), Unknown("OneCleared", medium), Bad("bad")])

    # --- steps ---

    def step(self) -> None:
        rng = self.rng
        kind = rng.random()
        handle = rng.choice(self.handles)
        if kind < 0.93:
            event = self.event()
            for _ in range(rng.choice([1] * 60 + [70])):
                self.both(lambda index: index.apply(handle, event))
        elif kind < 0.94 and len(self.handles) < 5:
            self.add()
        elif kind < 0.95:
            self.both(lambda index: index.clear_rank(handle))
        elif kind < 0.955 and len(self.handles) > 1:
            self.handles.remove(handle)
            self.both(lambda index: index.remove_rank(handle))
        elif kind < 0.96:
            limit = rng.randint(1, 9)
            self.both(lambda index: index.forget_unlinked(limit))
        elif kind < 0.98:
            limit = rng.randint(1, 9)
            self.both(lambda index: index.sweep(limit))
        else:
            self.exchange(handle)

    def exchange(self, handle: int) -> None:
        """Each index gives up the rank and takes it over from an image; of the other's making, or its own."""
        images = [_image(index, handle) for index in self.indexes]
        assert _summary(images[0]) == _summary(images[1])
        swapped = images[::-1] if self.rng.random() < 0.7 else images
        position = self.handles.index(handle)
        new = self.both(lambda index: index.add_rank())
        for index, image in zip(self.indexes, swapped, strict=True):
            importer = index.import_rank(new)
            for part in image:
                importer.take(_parts.decode(part))
            importer.finish()
        if self.rng.random() < 0.5:
            self.handles[position] = new
            self.both(lambda index: index.remove_rank(handle))
        else:
            self.handles.append(new)

    # --- what must be the same ---

    def compare(self) -> None:
        rng = self.rng
        for handle in self.handles:
            self.both(lambda index, h=handle: index.counters(h))
            self.both(lambda index, h=handle: list(index.windows(h).items()))
            self.both(lambda index, h=handle: (index.scheme(h), index.block_count(h)))
        self.both(lambda index: index.statistics())
        assert self.budgets[0].used == self.budgets[1].used
        for _ in range(3):
            self.ask(rng.choice(self.prompts))

    def ask(self, tokens: list[int]) -> None:
        rng = self.rng
        lora, salt = rng.choice(SPACES)
        asked = rng.sample(self.handles, rng.randint(1, len(self.handles)))
        size, eagle = rng.choice(self.sizes), rng.random() < 0.1
        keys = token_keys(tokens, size, lora_name=lora, cache_salt=salt, eagle=eagle)
        self.both(lambda index: index.match(keys, asked))
        self.both(lambda index: index.match(tuple(keys), dict.fromkeys(asked)))
        self.ask_nonsense(keys, asked)
        runs = [MediaRun(2, 2, "a", 5)] if rng.random() < 0.2 and len(tokens) > 4 else []
        plan = exact_plan("m", tokens, media=runs, lora_name=lora, cache_salt=salt)
        scheme = rng.choice(["media_keys", "pad30", "pad62"])
        self.both(lambda index: index.match(plan_keys(plan, size, scheme, eagle=eagle), asked))

    def ask_nonsense(self, keys: list[int], asked: list[int]) -> None:
        """Keys that are no chain: which of them a search looks at is its own matter, but each has an answer."""
        nonsense = self.rng.choices([*keys, 7], k=len(keys) + 1)
        for index in self.indexes:
            for found in index.match(nonsense, asked).values():
                assert 0 <= found.usable <= found.tiers[0] <= len(nonsense)

    def run(self, steps: int) -> None:
        for number in range(steps):
            self.step()
            if number % 5 == 0:
                self.compare()
            if number % 25 == 0:
                self.sound()
        self.finish()

    def sound(self) -> None:
        for index in self.indexes:
            assert index.check() == []

    def finish(self) -> None:
        """Everything goes, and nothing is left."""
        self.compare()
        for handle in self.handles:
            self.both(lambda index, h=handle: index.remove_rank(h))
        while not self.both(lambda index: index.sweep(50)):
            self.both(lambda index: index.statistics())
        assert self.both(lambda index: index.statistics().nodes) == 0
        self.sound()


def _engine_hash(space: Any, tokens: list[int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr((space, tokens)).encode(), digest_size=8).digest(), "big")


def _outcome(ask: Callable[[Any], Any], index: Any) -> Any:
    try:
        return ask(index)
    except (KeyError, ValueError, OverflowError) as error:
        return type(error)


def _image(index: Any, handle: int) -> list[bytes]:
    return [msgspec.msgpack.encode(part) for part in index.export_rank(handle)]


def _summary(image: list[bytes]) -> list[str]:
    """What the parts say, without their order, which may differ."""
    lines: list[str] = []
    spaces: list[Any] = []
    for raw in image:
        part = msgspec.to_builtins(_parts.decode(raw), str_keys=True)
        spaces += part.get("spaces", [])
        for node in part.get("nodes", []):
            lines.append(f"node {node[:3]} {spaces[node[3]]}")
        lines += [f"{name} {value}" for name in ("blocks", "waiting") for value in part.get(name, [])]
        if part["type"] in ("head", "tracked"):
            lines.append(str({name: value for name, value in part.items() if name != "copies"}))
            lines += [f"{name} {value}" for name, value in part.get("copies", {}).items()]
    return sorted(lines)


def campaign(other: Callable[..., Any], seeds: range, steps: int) -> None:
    """Run the histories of these seeds; AssertionError names the first that differs."""
    for seed in seeds:
        rng = random.Random(seed)
        try:
            History(rng, other).run(rng.choice([steps // 4, steps]))
        except Exception as error:
            raise AssertionError(f"history {seed} of {steps} steps: {error!r}") from error


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    from kvd.core._native import NativeIndex

    end = arguments.seed + arguments.histories
    for first in range(arguments.seed, end, 100):
        campaign(NativeIndex, range(first, min(first + 100, end)), arguments.steps)
        print(f"histories {arguments.seed} to {min(first + 100, end) - 1}: no difference", flush=True)


if __name__ == "__main__":
    main()
