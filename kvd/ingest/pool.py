"""One stream for a whole pool (Mooncake's master, RFC 1527): who holds a block is in each event.

Every holder (``backend_id``) becomes a row of its own, ``<pool>/<backend_id>``, which shares the pool's stream and so
its trust. Tenants other than ``default`` are spaces of their own that no plan asks for: their blocks are left out, and
their clears touch nobody else. A block counts for a holder only as far as that holder has the whole prefix before it:
pools that spread a prompt over holders match less than they could deliver. Nothing of a pool is ever scored as device
memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from kvd.core.fleet import Fleet, FleetError, Member
from kvd.core.residency import Applied, Outcome, Skipped
from kvd.ingest.feed import Feed
from kvd.ingest.transport import Transport
from protocols.events import Bad, Cleared, Event, Removed, Stored, Tier, Unknown, tier_of
from protocols.limits import Limits

MAX_HOLDERS = 256
"""Per pool; events of further holders are counted and left out, unless a holder that has nothing can make room."""
MAX_NAME = 256
_DEFAULT_TENANTS = (None, "", "default")


class PoolHolders:
    """What a pool's events are applied to. ``counters`` are told with the pool's stream."""

    def __init__(self, fleet: Fleet, pool: Member, counters: Counter[str], limit: int = MAX_HOLDERS) -> None:
        self._fleet = fleet
        self._pool = pool
        self._counters = counters
        self._limit = limit

    def apply(self, event: Event) -> Outcome:
        """Apply one event to its holder, or to all of them; count why if it is left out."""
        outcome = self._apply(event)
        if isinstance(outcome, Skipped):
            self._counters[f"skipped_{outcome.reason}"] += 1
        return outcome

    def reset(self) -> None:
        """A new lifetime of the pool: no holder has anything."""
        for holder in self._holders():
            holder.reset()

    def _holders(self) -> list[Member]:
        return [member for member in self._fleet.members.values() if member.pool == self._pool.spec.name]

    def _apply(self, event: Event) -> Outcome:
        if isinstance(event, (Stored, Removed)):
            return self._moved(event)
        if isinstance(event, Cleared):
            return self._cleared(event)
        if isinstance(event, Unknown) and "cleared" in event.tag.casefold():
            for holder in self._holders():
                holder.apply(event)
        return Skipped("bad_event" if isinstance(event, Bad) else "unknown_tag")

    def _moved(self, event: Stored | Removed) -> Outcome:
        if event.tenant_id not in _DEFAULT_TENANTS:
            return Skipped("other_tenant")
        if not event.backend_id or len(event.backend_id) > MAX_NAME:
            return Skipped("no_holder")
        if isinstance(event, Stored) and event.model_name not in (None, self._pool.spec.model):
            return Skipped("foreign_model")
        holder = self._holder(event.backend_id, wanted=isinstance(event, Stored))
        if holder is None:
            return Skipped("too_many_holders" if isinstance(event, Stored) else "unknown_holder")
        medium = "external" if tier_of(event.medium) is Tier.DEVICE else event.medium
        return holder.apply(msgspec.structs.replace(event, backend_id=None, tenant_id=None, medium=medium))

    def _cleared(self, event: Cleared) -> Outcome:
        if event.tenant_id not in _DEFAULT_TENANTS:
            return Skipped("other_tenant")
        if event.backend_id is None:
            holders = self._holders()
        else:
            holder = self._holder(event.backend_id, wanted=False)
            holders = [] if holder is None else [holder]
        own = msgspec.structs.replace(event, backend_id=None, tenant_id=None)
        outcomes = [holder.apply(own) for holder in holders]
        return Applied(sum(outcome.blocks for outcome in outcomes if isinstance(outcome, Applied)))

    def _holder(self, name: str, *, wanted: bool) -> Member | None:
        """The holder's row, made if ``wanted`` and if there may be one more."""
        found = self._fleet.members.get((f"{self._pool.spec.name}/{name}", 0))
        if found is not None:
            return found if found.pool == self._pool.spec.name else None
        if not wanted or not self._make_room():
            return None
        try:
            return self._fleet.add_holder(self._pool, name)
        except FleetError:
            return None

    def _make_room(self) -> bool:
        holders = self._holders()
        if len(holders) < self._limit:
            return True
        empty = next((holder for holder in holders if not holder.index.block_count(holder.handle)), None)
        if empty is None:
            return False
        self._fleet.remove(empty.spec.name)
        return True


class PoolFeed(Feed):
    """The feed of a pool's one stream: events go to the holders they name."""

    def __init__(
        self, fleet: Fleet, pool: Member, transport: Transport, clock: Callable[[], float], limits: Limits
    ) -> None:
        super().__init__(pool, transport, clock, limits)
        self._holder = PoolHolders(fleet, pool, self.counters)
