"""vLLM's block pool: physical blocks in one free queue, found by hash, evicted where the queue's head is taken.

As vLLM does it: blocks are found by others as soon as they are allocated; a request gives its blocks back last one
first, those without a hash to the queue's front; a hit takes them out of the queue; a prompt of whole blocks computes
its last one again, into a second copy, and says so. With recurrent groups, a state is kept where a prefill passes the
last whole block before the prompt's end, each state is a block of the same pool, and a hit needs one at its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Ordered

from bench.engine.cache import Cache, Held, HostTier, Sequence
from bench.engine.content import Block, Chain, Naming
from bench.engine.wire import Wire


class Slot:
    """A physical block: what it holds (None: nothing that can be found), for which group, and who uses it."""

    __slots__ = ("content", "group", "number", "users")

    def __init__(self, number: int) -> None:
        self.number = number
        self.content: Block | None = None
        self.group = 0
        self.users = 0


class Owned:
    """A sequence's slots: of attention in order, and per recurrent group the kept states and the running one."""

    def __init__(self, recurrent: int) -> None:
        self.attention: list[Slot] = []
        self.states: list[list[Slot]] = [[] for _ in range(recurrent)]


class BlockPool(Cache):
    """``recurrent`` groups come first, attention is the last group. ``backwards``: a mutation; evicts the most recently
    freed block, while the block that was due is said to be gone."""

    def __init__(
        self, wire: Wire, naming: Naming, *, blocks: int, recurrent: int = 0, host_blocks: int = 0,
        backwards: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(wire, naming)
        self.blocks = blocks
        self.recurrent = recurrent
        self.host = HostTier(wire, host_blocks, group=recurrent)
        self._backwards = backwards
        self._owned: dict[Sequence, Owned] = {}
        self._fill_up()

    def _fill_up(self) -> None:
        slots = [Slot(number) for number in range(self.blocks)]
        self._free: OrderedDict[int, Slot] = OrderedDict((slot.number, slot) for slot in slots)
        self._found: list[dict[bytes, list[Slot]]] = [{} for _ in range(self.recurrent + 1)]

    @property
    def attention(self) -> int:
        """The attention group's number."""
        return self.recurrent

    @property
    def usage(self) -> float:
        return 1 - len(self._free) / self.blocks

    # --- what is found -----------------------------------------------------------------------------------------------

    def held(self) -> Held:
        states = frozenset.intersection(*map(frozenset, self._found[:-1])) if self.recurrent else None
        return Held(frozenset(self._found[-1]), states, frozenset(self.host.held))

    def hit(self, chain: Chain) -> int:
        device, loaded = self._reusable(chain)
        return (device + loaded) * self.block_size

    def _reusable(self, chain: Chain) -> tuple[int, int]:
        """Blocks of the prompt found on the device, and beyond them on the host; the last token is always computed."""
        blocks = chain.upto(len(chain) - 1)
        found = self._found[-1]
        device = next((i for i, block in enumerate(blocks) if block.digest not in found), len(blocks))
        while device and not all(blocks[device - 1].digest in states for states in self._found[:-1]):
            device -= 1
        if self.recurrent or not self.host.held:
            return device, 0
        return device, self.host.following([block.digest for block in blocks[device:]])

    # --- a sequence's way --------------------------------------------------------------------------------------------

    def chunk(self, seq: Sequence, want: int) -> int:
        """With recurrent groups, a prefill stops where a state is to be kept: at whole blocks."""
        if not self.recurrent or seq.computed >= seq.prompt_tokens:
            return want
        end = min(seq.computed + want, len(seq.chain))
        last = (seq.prompt_tokens - 1) // self.block_size * self.block_size
        if seq.computed < last:
            end = min(end, last) // self.block_size * self.block_size if end >= self.block_size else end
        return max(end - seq.computed, min(want, 1))

    def admit(self, seq: Sequence, budget: int) -> int | None:
        device, loaded = self._reusable(seq.chain)
        blocks = seq.chain.upto((device + loaded) * self.block_size)
        reused = [self._found[-1][block.digest][0] for block in blocks[:device]]
        states = [found[blocks[device - 1].digest][0] for found in self._found[:-1]] if device else []
        before = seq.computed
        seq.computed = (device + loaded) * self.block_size
        chunk = self.chunk(seq, min(budget, len(seq.chain) - seq.computed))
        needed = self._needed(seq.computed + chunk) - device + self.recurrent
        if len(self._free) - sum(slot.number in self._free for slot in (*reused, *states)) < needed:
            seq.computed = before
            return None
        for slot in (*reused, *states):
            self._use(slot)
        owned = self._owned[seq] = Owned(self.recurrent)
        owned.attention += reused
        for group, state in enumerate(states):
            owned.states[group].append(state)
        seq.admitted(seq.computed)
        if seq.report_hits and device:
            self._report(blocks[:device], seq.session)
        if loaded:
            self._load(owned, blocks[device:], seq.session)
        assert self.extend(seq, chunk)
        return chunk

    def extend(self, seq: Sequence, tokens: int) -> bool:
        """Room for the tokens; whole blocks among them are found by others from now on."""
        owned, end = self._owned[seq], seq.computed + tokens
        missing = self._needed(end) - len(owned.attention)
        prefill = seq.computed < seq.prompt_tokens
        fresh_states = self.recurrent if prefill else 0
        if len(self._free) < missing + fresh_states:
            return False
        for states in owned.states if fresh_states else ():
            states.append(self._allocate())
        owned.attention += [self._allocate() for _ in range(missing)]
        self._name(seq, owned, end)
        return True

    def _needed(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _name(self, seq: Sequence, owned: Owned, end: int) -> None:
        """Give the blocks that become whole their names, group by group."""
        whole = seq.chain.upto(end)[seq.computed // self.block_size :]
        if not whole:
            return
        checkpoint = self._is_checkpoint(seq, end)
        for group, states in enumerate(owned.states):
            if checkpoint:
                self._fill(states[-1], group, whole[-1])
            kept = whole[-1:] if checkpoint else []
            self.wire.stored(whole, named=kept, group=group, kind="mamba", session=seq.session)
        for block in whole:
            self._fill(owned.attention[block.place], self.attention, block)
        self.wire.stored(whole, group=self.attention, session=seq.session)

    def _is_checkpoint(self, seq: Sequence, end: int) -> bool:
        return seq.computed < seq.prompt_tokens and end % self.block_size == 0 and end < seq.prompt_tokens

    def _report(self, blocks: Ordered[Block], session: str | None) -> None:
        for group in range(self.recurrent + 1):
            kind = "full_attention" if group == self.attention else "mamba"
            self.wire.stored(blocks, group=group, kind=kind, session=session)  # type: ignore[arg-type]

    def _load(self, owned: Owned, blocks: Ordered[Block], session: str | None) -> None:
        """Host blocks come back to the device, in slots of their own; the host keeps its copy."""
        for block in blocks:
            slot = self._allocate()
            self._fill(slot, self.attention, block)
            owned.attention.append(slot)
        self.wire.stored(blocks, group=self.attention, session=session)

    def settle(self, seq: Sequence) -> None:
        """Only the newest state is worked on: what was kept before it may be evicted from now on."""
        for states in self._owned[seq].states:
            self._give_back(states[:-1])
            del states[:-1]

    def release(self, seq: Sequence, *, finished: bool = True) -> None:
        del finished
        owned = self._owned.pop(seq)
        for states in owned.states:
            self._give_back(reversed(states))
        self._give_back(reversed(owned.attention))

    def clear(self) -> None:
        assert not self._owned
        self._fill_up()
        self.host.clear()
        self.wire.cleared()

    # --- slots -------------------------------------------------------------------------------------------------------

    def _use(self, slot: Slot) -> None:
        slot.users += 1
        self._free.pop(slot.number, None)

    def _give_back(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            slot.users -= 1
            if not slot.users:
                self._free[slot.number] = slot
                if slot.content is None:
                    self._free.move_to_end(slot.number, last=False)

    def _allocate(self) -> Slot:
        slot = self._free[next(reversed(self._free) if self._backwards else iter(self._free))]
        due = next(iter(self._free.values())) if self._backwards else slot
        del self._free[slot.number]
        if slot.content is not None:
            self._evict(slot, due)
        slot.users = 1
        return slot

    def _fill(self, slot: Slot, group: int, content: Block) -> None:
        slot.group, slot.content = group, content
        self._found[group].setdefault(content.digest, []).append(slot)

    def _evict(self, slot: Slot, said: Slot) -> None:
        content = slot.content
        assert content is not None
        copies = self._found[slot.group][content.digest]
        copies.remove(slot)
        if not copies:
            del self._found[slot.group][content.digest]
        slot.content = None
        if slot.group == self.attention:
            self.host.take(content)
        told, group = (said.content, said.group) if said.content is not None else (content, slot.group)
        self.wire.removed([told], group=group)
