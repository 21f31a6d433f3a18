"""A router and an engine's prefix cache, small enough to be evidently right, to show what an exact plan must achieve.

The engine hashes whole blocks of what it holds (its own function, not kvd's), announces them, and reuses at most all
but the last prompt token. The router keys announcements and plans with ``protocols.keys`` and counts the leading blocks
it knows. ``failures`` runs one case, a block size and a text length, and names the assertions that do not hold. A
``Mutation`` is one mistake on one side.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cached_property
from itertools import takewhile

from planner.identity import from_hash
from planner.layout import Placeholder, expand, validate
from protocols.keys import Keys, chain, local_hash, media_part, namespace_seed, plan_keys
from protocols.media import MediaRun, Scheme, narrow_pad, wide_pads
from protocols.plan import ExactPlan
from protocols.tokens import block_words, pack_tokens

BLOCK_SIZES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4352, 6144, 7920)
TEXT_LENGTHS = range(1, 80)
ENGINES: dict[str, Scheme] = {"vllm": "media_keys", "sglang-narrow": "pad30", "sglang-wide": "pad62"}
IDS = Placeholder(
    image=154854, image_start=154830, image_end=154831, video=154855, video_start=154832, video_end=154833
)
A, B, C = (int.from_bytes(hashlib.sha256(name).digest()[:8], "big") for name in (b"A", b"B", b"C"))
_HEADER = [154822, 154824, 154826, 9001, 9002, 9003, 9004, 154827]
_TAIL = [154828, 154841]


class Mutation(Enum):
    NONE = "none"
    ROUTER_IGNORES_CONTENT = "content left out of router keys"
    ENGINE_IGNORES_CONTENT = "content left out of engine keys"
    ALL_IMAGES = "every image keyed by all images of the request"
    COUNT_OFF_BY_ONE = "router counts one pad too many"
    NO_DELIMITERS = "router drops the delimiters"


class Prompt:
    """Header, ``text`` tokens, one image per hash, tail; expanded as the planner does it."""

    def __init__(self, text: int, images: Sequence[int], count: int) -> None:
        tokens = [*_HEADER, *range(20_000, 20_000 + text)]
        for _ in images:
            tokens += [IDS.image_start, IDS.image, IDS.image_end]
        self.short = tokens + _TAIL
        self.images = tuple(images)
        self.count = count
        validate(self.short, IDS, len(images))

    @cached_property
    def plan(self) -> ExactPlan:
        return self.plan_with(self.short, self.count)

    @cached_property
    def tokens(self) -> list[int]:
        return expand(self.short, IDS, [self.count] * len(self.images)).tokens

    def plan_with(self, tokens: list[int], count: int) -> ExactPlan:
        expansion = expand(tokens, IDS, [count] * len(self.images))
        runs = [
            MediaRun(start, count, from_hash(image).identifier, image)
            for start, image in zip(expansion.starts, self.images, strict=True)
        ]
        return _plan(expansion.tokens, runs)


class Engine:
    """A worker's cache. ``seen`` holds one digest per whole block."""

    def __init__(self, kind: str, block: int, mutation: Mutation) -> None:
        self.kind = kind
        self.block = block
        self.blind = mutation is Mutation.ENGINE_IGNORES_CONTENT
        self.seen: set[bytes] = set()
        self.hashed: dict[Prompt, list[bytes]] = {}

    def held(self, prompt: Prompt) -> array[int]:
        """The token ids the engine keeps: pads in SGLang, placeholders in vLLM."""
        tokens = array("Q", prompt.tokens)
        for run in prompt.plan.media if self.kind != "vllm" else ():
            cycle = wide_pads(run.hash64 or 0) if self.kind == "sglang-wide" else (narrow_pad(run.hash64 or 0),)
            tokens[run.start : run.end] = (array("Q", cycle) * (run.count // len(cycle) + 1))[: run.count]
        return tokens

    def extra_keys(self, prompt: Prompt) -> list[list[tuple[str, int]]]:
        """Per whole block, what vLLM announces beside the tokens: every item that overlaps it, and where."""
        if self.kind != "vllm":
            return [[] for _ in range(len(prompt.tokens) // self.block)]
        return [
            [
                (run.identifier or "", run.start - begin)
                for run in prompt.plan.media
                if run.start < begin + self.block and run.end > begin
            ]
            for begin in range(0, len(prompt.tokens) // self.block * self.block, self.block)
        ]

    def digests(self, prompt: Prompt) -> list[bytes]:
        if prompt not in self.hashed:
            self.hashed[prompt] = list(self._digests(prompt))
        return self.hashed[prompt]

    def _digests(self, prompt: Prompt) -> Iterator[bytes]:
        held = array("Q", prompt.tokens) if self.blind else self.held(prompt)
        parent = b""
        for i, extra in enumerate(self.extra_keys(prompt)):
            content = held[i * self.block : (i + 1) * self.block].tobytes() + (
                b"" if self.blind else repr(extra).encode()
            )
            parent = hashlib.blake2b(parent + content, digest_size=16).digest()
            yield parent

    def cached_tokens(self, prompt: Prompt) -> int:
        blocks = sum(1 for _ in takewhile(self.seen.__contains__, self.digests(prompt)))
        return min(blocks, (len(prompt.tokens) - 1) // self.block) * self.block

    def serve(self, prompt: Prompt) -> None:
        self.seen.update(self.digests(prompt))


class Router:
    """What a worker announced, by block key."""

    def __init__(self, engine: Engine, mutation: Mutation) -> None:
        self.engine = engine
        self.mutation = mutation
        self.known: set[int] = set()
        self.keyed: dict[Prompt, Keys] = {}

    def learn(self, prompt: Prompt) -> None:
        """Take in the engine's announcement of a whole prompt."""
        if self.mutation in (Mutation.ROUTER_IGNORES_CONTENT, Mutation.ALL_IMAGES):
            self.known.update(self.keys(prompt))
            return
        held, block = self.engine.held(prompt), self.engine.block
        key: int | None = None
        for i, extra in enumerate(self.engine.extra_keys(prompt)):
            words = block_words(held[i * block : (i + 1) * block])
            key = chain(key, local_hash(words + media_part(extra), namespace_seed(None, None)))
            self.known.add(key)

    def overlap(self, prompt: Prompt) -> int:
        """Leading blocks of the prompt's plan that are known."""
        return sum(1 for _ in takewhile(self.known.__contains__, self.keys(prompt)))

    def total_blocks(self, prompt: Prompt) -> int:
        plan = self._mistaken(prompt)
        return -(-(len(plan.tokens) // 4) // self.engine.block)

    def keys(self, prompt: Prompt) -> Keys:
        if prompt not in self.keyed:
            plan = self._mistaken(prompt)
            self.keyed[prompt] = plan_keys(plan, self.engine.block, ENGINES[self.engine.kind])
        return self.keyed[prompt]

    def _mistaken(self, prompt: Prompt) -> ExactPlan:
        """The plan the router works with, mistakes included."""
        if self.mutation is Mutation.ROUTER_IGNORES_CONTENT:
            return _plan(prompt.tokens, [])
        if self.mutation is Mutation.ALL_IMAGES:
            together = int.from_bytes(hashlib.sha256(repr(prompt.images).encode()).digest()[:8], "big")
            return _renamed(prompt, together)
        if self.mutation is Mutation.COUNT_OFF_BY_ONE:
            return prompt.plan_with(prompt.short, prompt.count + 1)
        if self.mutation is Mutation.NO_DELIMITERS:
            return prompt.plan_with(
                [t for t in prompt.short if t not in (IDS.image_start, IDS.image_end)], prompt.count
            )
        return prompt.plan


def _renamed(prompt: Prompt, hash64: int) -> ExactPlan:
    runs = [MediaRun(run.start, run.count, from_hash(hash64).identifier, hash64) for run in prompt.plan.media]
    return _plan(prompt.tokens, runs)


def _plan(tokens: list[int], runs: Sequence[MediaRun]) -> ExactPlan:
    return ExactPlan(model="m", tokens=pack_tokens(tokens), media=tuple(runs))


def failures(block: int, text: int, count: int, engine_kind: str, mutation: Mutation = Mutation.NONE) -> set[str]:
    """The assertions that one case breaks; ``count`` tokens an image."""
    plain, one, other = (Prompt(text, images, count) for images in ((), (A,), (B,)))
    two, second, swapped = (Prompt(text, images, count) for images in ((A, B), (A, C), (B, A)))
    checks = _single(block, engine_kind, mutation, plain, one, other)
    checks |= _double(block, engine_kind, mutation, two, second, swapped)
    checks["expansion.two"] = len(two.tokens) - len(one.tokens) == count + 2
    return {name for name, holds in checks.items() if not holds}


def _single(block: int, kind: str, mutation: Mutation, plain: Prompt, one: Prompt, other: Prompt) -> dict[str, bool]:
    engine = Engine(kind, block, mutation)
    router = Router(engine, mutation)
    length, first = len(one.tokens), one.plan.media[0].start
    checks = {
        "expansion.total": router.total_blocks(one) == -(-length // block),
        "expansion.one": length - len(plain.tokens) == one.count + 2,
        "cold.router": router.overlap(one) == 0,
        "cold.engine": engine.cached_tokens(one) == 0,
    }
    engine.serve(one)
    router.learn(one)
    cached = engine.cached_tokens(one)
    return checks | {
        "repeat.router": router.overlap(one) == length // block > first // block,
        "repeat.engine": cached == (length - 1) // block * block > first,
        "isolation.router": router.overlap(other) == first // block,
        "isolation.engine": engine.cached_tokens(other) <= first,
        "isolation.total": router.total_blocks(other) == router.total_blocks(one),
    }


def _double(block: int, kind: str, mutation: Mutation, two: Prompt, second: Prompt, swapped: Prompt) -> dict[str, bool]:
    engine = Engine(kind, block, mutation)
    router = Router(engine, mutation)
    engine.serve(two)
    router.learn(two)
    first, next_first = (run.start for run in two.plan.media)
    cached = engine.cached_tokens(second)
    return {
        "two.repeat.router": router.overlap(two) == len(two.tokens) // block,
        "two.repeat.engine": engine.cached_tokens(two) == (len(two.tokens) - 1) // block * block,
        "two.swap_second.router": router.overlap(second) == next_first // block > first // block,
        "two.swap_second.engine": next_first // block * block <= cached <= next_first,
        "two.swapped_order.router": router.overlap(swapped) == first // block,
    }
