"""What one rank holds: copies per engine hash, and which content each hash names.

The engine's hash is opaque and local to the rank. A *block* is one hash of the indexed group with its copies per tier
and, once its chain is known, the tree node it is tied to. Copies are counted, because an engine may hold a block twice
and announces each copy's eviction; flags would lose the second copy.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import msgspec

from kvd.core.groups import Copies, Group, Groups, no_copies
from kvd.core.tree import WIDTH, KeySequence, Node, Space, Tree, Window, levels_of
from protocols.events import BlockExtra, Cleared, Event, Removed, Stored, Tier, Unknown, tier_of
from protocols.keys import chain, digest_part, local_hash, media_part, namespace_seed
from protocols.media import PAD_BASE, Scheme
from protocols.tokens import UINT32_MAX, block_words

ROOT_PARENTS = frozenset({0, 5740354900026072187})
"""Parents that mean "none" where the stream never announced them: LMCache and old simulators send 0, SGLang up to
0.5.0 Python's ``hash(())``. A true hash equals one of them with probability 2^-63."""

DOUBTS = ("not_dense", "block_size_varies", "ambiguous_namespace", "unlinked_dropped")
"""What leaves device blocks that no prompt can be credited with: a zero may then be wrong, and trust must say so."""
MEDIA_DOUBTS = ("string_tokens", "media_unreadable", "ambiguous_extra_keys")
"""The same for media only: text is matched all the same, so trust stands, and a zero for media says it cannot know."""
_NARROW_END = PAD_BASE + (1 << 30)
_CHUNKED_MEDIA = ("CPU", "STORAGE", "FS", "OBJ")
"""What vLLM's offloading connectors call their media."""
_FARTHER = (Tier.HOST, Tier.DISK, Tier.EXTERNAL)


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Per rank; beyond a bound the oldest entry goes and is counted."""

    unlinked: int = 65_536
    remembered: int = 65_536
    block_sizes: int = 8


class Budget:
    """Blocks that all ranks of all models may have together."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class Applied(msgspec.Struct, frozen=True):
    """The event changed ``blocks`` blocks. ``doubt``: why some of what the device holds cannot be credited, if so."""

    blocks: int
    doubt: str = ""


class Skipped(msgspec.Struct, frozen=True):
    """The event was left out, for a reason that is counted."""

    reason: str


Outcome = Applied | Skipped


class Content:
    """What an announced block holds, until its chain is known: the bytes to hash and what precedes it."""

    __slots__ = ("body", "lora", "parent", "salt", "window")

    def __init__(self, parent: int | None, body: bytes, window: Window, lora: str | None, salt: str | None) -> None:
        self.parent = parent
        self.body = body
        self.window = window
        self.lora = lora
        self.salt = salt


class Block:
    """One engine hash of the indexed group. ``node``: its content; ``content``: announced, but not linked yet."""

    __slots__ = ("chunks", "content", "copies", "hash", "node", "window")

    def __init__(self, hash_: int) -> None:
        self.hash = hash_
        self.copies: Copies = no_copies()
        self.node: Node | None = None
        self.window: Window | None = None
        self.content: Content | None = None
        self.chunks: set[int] | None = None
        """Last hashes of the offloaded chunks this block is in the middle of: each is loaded whole or not at all."""

    @property
    def nearest(self) -> Tier | None:
        """The nearest tier with a copy."""
        device, host, disk, external = self.copies
        if device:
            return Tier.DEVICE
        return Tier.HOST if host else Tier.DISK if disk else Tier.EXTERNAL if external else None


class Residency:
    """One rank's side of the index. All methods are O(blocks in the event) unless they say more."""

    def __init__(
        self,
        tree: Tree,
        slot: int,
        budget: Budget,
        *,
        block_size: int | None,
        scheme: Scheme | None,
        bounds: Bounds,
        single_copies: bool = False,
    ) -> None:
        self.tree = tree
        self.slot = slot
        self.budget = budget
        self.registered_size = block_size
        self.registered_scheme = scheme
        self.bounds = bounds
        self.single_copies = single_copies
        self.chunked = False
        self.counters: Counter[str] = Counter()
        self.learnt_scheme: Scheme | None = None
        self.groups = Groups()
        self.blocks: dict[int, Block] = {}
        self.names: dict[Node, list[Block]] = {}
        self.waiting: dict[int, list[Block]] = {}
        self.unlinked: OrderedDict[int, Block] = OrderedDict()
        self.remembered: OrderedDict[int, Block] = OrderedDict()
        self.windows: Counter[Window] = Counter()
        self.spaces: dict[tuple[str | None, str | None], Space] = {}

    @property
    def scheme(self) -> Scheme | None:
        """How this rank tells media apart: as registered, else as learnt, else unknown."""
        return self.registered_scheme or self.learnt_scheme

    # --- events ------------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> Outcome:
        """Apply one event and count its outcome."""
        outcome = self._apply(event)
        if isinstance(outcome, Skipped):
            self.counters[f"skipped_{outcome.reason}"] += 1
        return outcome

    def _apply(self, event: Event) -> Outcome:
        if isinstance(event, Stored):
            return self._stored(event)
        if isinstance(event, Removed):
            return self._removed(event)
        if isinstance(event, Cleared):
            return self._cleared(event)
        if isinstance(event, Unknown):
            return self._unknown(event)
        return Skipped("bad_event")

    def _refusal(self, event: Stored | Removed) -> str | None:
        if event.backend_id is not None:
            return "foreign_holder"
        if event.locality is not None and event.locality.casefold() != "local":
            return "not_local"
        return "unknown_medium" if tier_of(event.medium) is None else None

    def _stored(self, event: Stored) -> Outcome:
        refusal = self._refusal(event)
        if refusal is not None:
            return Skipped(refusal)
        tier = tier_of(event.medium) or Tier.DEVICE
        place = self.groups.of_store(event.group, event.spec_kind, event.sliding_window)
        if isinstance(place, str):
            return Skipped(place)
        role, number = place
        if role == "tracked":
            return self._store_tracked(self.groups.tracked[number], event.hashes, tier)
        if self.budget.used + len(event.hashes) > self.budget.limit:
            return Skipped("index_full")
        return self._store_indexed(event, tier)

    def _store_tracked(self, group: Group, hashes: Sequence[int], tier: Tier) -> Outcome:
        if len(group.copies) + len(hashes) > self.budget.limit:
            return Skipped("index_full")
        for hash_ in hashes:
            group.add(hash_, tier, single=self.single_copies)
        return Applied(len(hashes))

    def _store_indexed(self, event: Stored, tier: Tier) -> Outcome:
        before = self._doubts()
        contents = self._contents(event)
        if isinstance(contents, Skipped):
            if contents.reason == "block_size_mismatch":
                return contents
            self.counters[contents.reason] += 1
            contents = [None] * len(event.hashes)
        for hash_, content in zip(event.hashes, contents, strict=True):
            self._store_block(hash_, content, tier)
        if tier is not Tier.DEVICE:
            self._mark_chunk(event)
            return Applied(len(event.hashes))
        raised = (name for name, now, then in zip(DOUBTS, self._doubts(), before, strict=True) if now > then)
        return Applied(len(event.hashes), next(raised, ""))

    def _doubts(self) -> list[int]:
        return [self.counters[name] for name in DOUBTS]

    def _store_block(self, hash_: int, content: Content | None, tier: Tier) -> None:
        block = self.blocks.get(hash_)
        if block is None:
            self.budget.used += 1
            block = self.blocks[hash_] = Block(hash_)
        if content is not None:
            self._announce(block, content)
        block.copies[tier] = 1 if self.single_copies else block.copies[tier] + 1
        self.remembered.pop(hash_, None)
        self._hold(block)

    def _mark_chunk(self, event: Stored) -> None:
        """vLLM's offloading announces a chunk's blocks in one event and loads them together; SGLang's pages do not."""
        if event.medium not in _CHUNKED_MEDIA or not event.dense:
            return
        *inner, last = event.hashes
        self.chunked = self.chunked or bool(inner)
        for hash_ in inner:
            block = self.blocks[hash_]
            block.chunks = (block.chunks or set()) | {last}

    def _removed(self, event: Removed) -> Outcome:
        refusal = self._refusal(event)
        if refusal is not None:
            return Skipped(refusal)
        tier = tier_of(event.medium) or Tier.DEVICE
        place = self.groups.of_removal(event.group)
        if isinstance(place, str):
            return Skipped(place)
        role, number = place
        group: Group | None = self.groups.tracked[number] if role == "tracked" else None
        remove = self._remove_copy if group is None else group.remove
        known = sum(remove(hash_, tier) for hash_ in event.hashes)
        self.counters["unknown_removals"] += len(event.hashes) - known
        return Applied(known)

    def _remove_copy(self, hash_: int, tier: Tier) -> bool:
        block = self.blocks.get(hash_)
        if block is None or not block.copies[tier]:
            return False
        block.copies[tier] -= 1
        if not any(block.copies[farther] for farther in _FARTHER):
            block.chunks = None
        self._hold(block)
        self._retire(block)
        return True

    def _cleared(self, event: Cleared) -> Outcome:
        if event.backend_id is not None or event.tenant_id is not None:
            return Skipped("foreign_holder")
        if event.medium is None:
            # The other tiers may or may not be empty now: their blocks stop counting until announced again.
            return Applied(self._empty((Tier.DEVICE, *_FARTHER)))
        tier = tier_of(event.medium)
        return Skipped("unknown_medium") if tier is None else Applied(self._empty((tier,)))

    def _unknown(self, event: Unknown) -> Outcome:
        if "cleared" not in event.tag.casefold():
            return Skipped("unknown_tag")
        tier = tier_of(event.medium) if event.medium else None
        self._empty(tuple(Tier) if tier is None else (tier,))
        return Skipped("unknown_clear")

    def _empty(self, tiers: Sequence[Tier]) -> int:
        """Take all copies off these tiers. O(blocks of the rank)."""
        touched = [block for block in self.blocks.values() if any(block.copies[tier] for tier in tiers)]
        for block in touched:
            if any(block.copies[tier] for tier in tiers if tier in _FARTHER):
                self.counters["unconfirmed"] += 1
            for tier in tiers:
                block.copies[tier] = 0
            block.chunks = None
            self._hold(block)
            self._retire(block)
        return len(touched) + sum(group.clear(tiers) for group in self.groups.tracked.values())

    def dismantle(self, limit: int) -> bool:
        """Undo up to ``limit`` blocks; True once nothing is left. The rank must no longer be asked about."""
        for _ in range(min(limit, len(self.blocks))):
            _, block = self.blocks.popitem()  # O(1), where the first entry costs the dict's deleted ones
            self._bury(block)
        return not self.blocks

    def forget_remembered(self, limit: int) -> int:
        """Forget up to ``limit`` blocks that have no copies, oldest first; how many there were."""
        count = min(limit, len(self.remembered))
        for _ in range(count):
            self._forget(next(iter(self.remembered.values())))
        return count

    def forget_unlinked(self, limit: int) -> int:
        """Give up at most ``limit`` blocks that wait for a parent never announced, oldest first; how many."""
        count = min(limit, len(self.unlinked))
        for _ in range(count):
            self.counters["unlinked_dropped"] += 1
            self._forget(next(iter(self.unlinked.values())))
        return count

    # --- content -----------------------------------------------------------------------------------------------------

    def _contents(self, event: Stored) -> list[Content | None] | Skipped:
        """Each block's content, as far as the event says it beyond doubt; else why it does not."""
        if not event.tokens:
            return Skipped("without_tokens")
        if not event.dense:
            return Skipped("string_tokens" if "string_token" in event.warn else "not_dense")
        if self.registered_size is not None and event.block_size != self.registered_size:
            return Skipped("block_size_mismatch")
        if (event.block_size, event.eagle) not in self.windows and len(self.windows) >= self.bounds.block_sizes:
            return Skipped("block_size_varies")
        extras = event.extra or (None,) * len(event.hashes)
        if len(extras) != len(event.hashes) or event.block_mm_infos:
            return Skipped("media_unreadable")
        self._learn_scheme(event, extras)
        return list(self._each_content(event, extras))

    def _each_content(self, event: Stored, extras: Sequence[BlockExtra | None]) -> Iterator[Content | None]:
        lora = event.lora_name or (None if event.lora_id is None else f"\0lora_id={event.lora_id}")
        parent = self._parent(event.parent)
        for i, (hash_, extra) in enumerate(zip(event.hashes, extras, strict=True)):
            salt = event.cache_salt
            strings = extra.strings if extra is not None else ()
            if strings and parent is None and len(strings) == 1:
                salt, strings = strings[0], ()
            if strings:
                self.counters["ambiguous_extra_keys"] += 1
                yield None
            else:
                yield Content(parent, _body(event, i, extra), (event.block_size, event.eagle), lora, salt or None)
            parent = hash_

    def _parent(self, parent: int | None) -> int | None:
        return None if parent in ROOT_PARENTS and parent not in self.blocks else parent

    def _learn_scheme(self, event: Stored, extras: Iterable[BlockExtra | None]) -> None:
        if self.learnt_scheme is not None:
            return
        highest = max(t for t in event.tokens if isinstance(t, int))
        if any(extra is not None and extra.media for extra in extras):
            self.learnt_scheme = "media_keys"
        elif highest > UINT32_MAX:
            self.learnt_scheme = "pad62"
        elif PAD_BASE <= highest < _NARROW_END:
            self.learnt_scheme = "dynamo" if self.registered_scheme == "dynamo" else "pad30"  # the same pads
        if self.learnt_scheme is not None and self.scheme != self.learnt_scheme:
            self.counters["scheme_mismatch"] += 1

    def _announce(self, block: Block, content: Content) -> None:
        """Tie the block to its content, or let it wait for its parent; then link whoever waited for it."""
        ready = [(block, content)]
        while ready:
            block, content = ready.pop()
            node = self._node(block, content)
            if node is None:
                continue
            self._tie(block, content, node)
            ready.extend((child, child.content) for child in self.waiting.pop(block.hash, ()) if child.content)

    def _node(self, block: Block, content: Content) -> Node | None:
        """The content's node; None if its chain is unknown (the block then waits) or contradicts its parent's space."""
        if content.parent is None:
            space = self._space(content.lora, content.salt)
            return self._tree_node(None, space, content)
        above = self.blocks.get(content.parent)
        if above is None or above.node is None:
            self._wait(block, content)
            return None
        space = above.node.space
        if content.lora != space.lora or content.salt not in (None, space.salt):
            self.counters["ambiguous_namespace"] += 1
            if block.node is not None:
                self._reuse(block)
            self._untie(block)
            return None
        return self._tree_node(above.node, space, content)

    def _tree_node(self, parent: Node | None, space: Space, content: Content) -> Node:
        local = local_hash(content.body, space.seed)
        key = chain(None if parent is None else parent.key, local)
        return self.tree.node(key, local, parent, space)

    def _space(self, lora: str | None, salt: str | None) -> Space:
        space = self.spaces.get((lora, salt))
        if space is None:
            if len(self.spaces) >= self.bounds.remembered:
                self.spaces.clear()  # nodes keep the ones in use alive
            space = self.spaces[lora, salt] = Space(lora, salt, namespace_seed(lora, salt))
        return space

    def _wait(self, block: Block, content: Content) -> None:
        node = block.node
        if _differs(block.content, content) or (
            node is not None and node.local != local_hash(content.body, node.space.seed)
        ):
            self._reuse(block)
        self._untie(block)
        self.adopt_waiting(block, content)

    def adopt_waiting(self, block: Block, content: Content) -> None:
        """Let a block that is tied to nothing wait for its parent; beyond the bound the oldest no longer waits."""
        block.content = content
        assert content.parent is not None
        self.waiting.setdefault(content.parent, []).append(block)
        self.unlinked[block.hash] = block
        if len(self.unlinked) > self.bounds.unlinked:
            self.counters["unlinked_dropped"] += 1
            self._unwait(next(iter(self.unlinked.values())))

    def _unwait(self, block: Block) -> None:
        content, block.content = block.content, None
        self.unlinked.pop(block.hash, None)
        siblings = self.waiting.get(content.parent) if content is not None and content.parent is not None else None
        if siblings is not None and block in siblings:
            siblings.remove(block)
            if not siblings and content is not None and content.parent is not None:
                del self.waiting[content.parent]

    def _tie(self, block: Block, content: Content, node: Node) -> None:
        if block.node is node:
            return
        if block.node is not None or _differs(block.content, content):
            self._reuse(block)
        node.pins += 1
        self._untie(block)
        node.pins -= 1
        self.adopt(block, content.window, node)

    def adopt(self, block: Block, window: Window, node: Node) -> None:
        """Tie a block that is tied to nothing. O(1), plus what coverage changes below."""
        node.pins += 1
        block.node, block.window = node, window
        self.names.setdefault(node, []).append(block)
        self.windows[window] += 1
        self._hold(block)

    def _reuse(self, block: Block) -> None:
        """The hash now names other content: what it named is gone."""
        self.counters["reused_hashes"] += 1
        block.copies = no_copies()
        block.chunks = None

    def _untie(self, block: Block) -> None:
        """Undo what the block is tied to or waits for; its copies stay."""
        if block.content is not None:
            self._unwait(block)
        node, window = block.node, block.window
        if node is None or window is None:
            return
        block.node = block.window = None
        names = self.names[node]
        names.remove(block)
        if not names:
            del self.names[node]
        self._hold_node(node)
        node.pins -= 1
        self.windows[window] -= 1
        if not self.windows[window]:
            del self.windows[window]
        self.tree.release(node)

    def _hold(self, block: Block) -> None:
        if block.node is not None:
            self._hold_node(block.node)

    def _hold_node(self, node: Node) -> None:
        self.tree.hold(node, self.slot, _nearest(self.names.get(node, ())))

    def _retire(self, block: Block) -> None:
        """A block without copies is remembered for its content (a later placeholder names only the hash), bounded."""
        if any(block.copies):
            return
        if block.node is None:
            self._forget(block)
            return
        self.remembered[block.hash] = block
        self.remembered.move_to_end(block.hash)
        if len(self.remembered) > self.bounds.remembered:
            self._forget(next(iter(self.remembered.values())))

    def _forget(self, block: Block) -> None:
        del self.blocks[block.hash]
        self._bury(block)

    def _bury(self, block: Block) -> None:
        self._untie(block)
        self.remembered.pop(block.hash, None)
        self.budget.used -= 1

    # --- questions ---------------------------------------------------------------------------------------------------

    def path(self, keys: KeySequence, length: int) -> list[Node]:
        """The nodes of the first ``length`` keys, up to one this rank does not name: no chain has such. O(length)."""
        path: list[Node] = []
        for i in range(length):
            node = self.tree.nodes.get(keys[i])
            if node is None or node not in self.names:
                break
            path.append(node)
        return path

    def usable(self, path: Sequence[Node], level: Tier) -> int:
        """How many of the blocks of ``path``, all of which this rank covers, a hybrid model can reuse."""
        if not self.groups.tracked or not path:
            return len(path)
        blocks = [self.names[node] for node in path]
        block_size = (blocks[0][0].window or (1, False))[0]
        return self.groups.usable([[block.hash for block in names] for names in blocks], block_size, level)

    def whole(self, path: Sequence[Node], device: int) -> int:
        """How many of the blocks of ``path`` can be loaded, the first ``device`` of them being on the device already.

        A block in the middle of an offloaded chunk counts only if the chunk's end is reached too. O(path).
        """
        ends = {block.hash for node in path for block in self.names[node]}
        reach = len(path)
        while reach > device and not any(self._loadable(block, ends) for block in self.names[path[reach - 1]]):
            reach -= 1
        return reach

    @staticmethod
    def _loadable(block: Block, ends: set[int]) -> bool:
        return any(block.copies) and (bool(block.copies[Tier.DEVICE]) or not block.chunks or bool(block.chunks & ends))

    def check(self) -> list[str]:
        """Every invariant that is broken, in words. O(blocks of the rank)."""
        faults = [f"slot {self.slot}: block {h:#x} filed as {b.hash:#x}" for h, b in self.blocks.items() if b.hash != h]
        faults += [fault for block in self.blocks.values() for fault in self._faults(block)]
        faults += [
            f"slot {self.slot}: holds {node.key:#x} at levels {node.held >> WIDTH * self.slot & 15:#x}, unlike blocks"
            for node, blocks in self.names.items()
            if node.held >> WIDTH * self.slot & 15 != levels_of(_nearest(blocks))
        ]
        windows = Counter(block.window for block in self.blocks.values() if block.window is not None)
        if windows != self.windows:
            faults.append(f"slot {self.slot}: windows {dict(self.windows)}, expected {dict(windows)}")
        return faults

    def _faults(self, block: Block) -> Iterator[str]:
        name = f"slot {self.slot}: block {block.hash:#x}"
        if min(block.copies) < 0:
            yield f"{name} has copies {block.copies}"
        if block.node is not None and block not in self.names.get(block.node, ()):
            yield f"{name} is tied to a node that does not name it"
        if (block.node is None) != (block.window is None):
            yield f"{name} is tied to {block.node and hex(block.node.key)} with window {block.window}"
        if block.node is not None and block.content is not None:
            yield f"{name} is both tied and waiting"
        if (block.content is not None) != (block.hash in self.unlinked):
            yield f"{name} waits without being counted as unlinked"
        if (block.hash in self.remembered) != (not any(block.copies)):
            yield f"{name} has copies {block.copies} and is {'' if any(block.copies) else 'not '}remembered"


def _differs(waits: Content | None, content: Content) -> bool:
    return waits is not None and (waits.parent, waits.body) != (content.parent, content.body)


def _nearest(blocks: Sequence[Block]) -> Tier | None:
    """The nearest tier with a copy of any of the blocks."""
    if len(blocks) == 1:
        return blocks[0].nearest
    return min((tier for block in blocks if (tier := block.nearest) is not None), default=None)


def _body(event: Stored, index: int, extra: BlockExtra | None) -> bytes:
    start = index * event.block_size
    words = block_words(cast(list[int], event.tokens[start : start + event.block_size + event.eagle]))
    if extra is None:
        return words
    return words + media_part(extra.media) + digest_part(extra.digests)
