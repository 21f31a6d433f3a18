"""The index over flat arrays and open-addressing tables, where the package was built with a compiler."""

from collections.abc import Iterable, Iterator, Mapping

from kvd.core.image import Part
from kvd.core.reference import Reach, Statistics
from kvd.core.residency import Bounds, Budget, Outcome
from kvd.core.tree import KeySequence, Window
from protocols.events import Event
from protocols.keys import Keys
from protocols.media import Scheme

def packed_keys(keys: Keys) -> bytes:
    """All keys of a prompt as packed u64 words, little-endian. O(tokens)."""

class Reaches(Mapping[int, Reach]):
    """What a match found, by handle; values are made as they are asked for."""

    def __getitem__(self, handle: int) -> Reach: ...
    def __iter__(self) -> Iterator[int]: ...
    def __len__(self) -> int: ...
    def packed(self) -> bytes:
        """Five int32 a rank asked about, in the order of the question: blocks by tier, cumulative, and usable ones."""

class NativeImporter:
    """Takes the parts of one rank, in order, into an empty one."""

    def take(self, part: Part, /) -> None:
        """Take the next part. ValueError if it contradicts what was told before. O(part)."""

    def finish(self) -> None:
        """All parts were taken: nodes that no block ties go. O(nodes told)."""

class NativeIndex:
    """All ranks of one model; every method does what its namesake of ReferenceIndex does."""

    implementation: str

    def __init__(self, *, max_blocks: int = ..., budget: Budget | None = None) -> None: ...
    def add_rank(
        self,
        *,
        block_size: int | None = None,
        scheme: Scheme | None = None,
        bounds: Bounds | None = None,
        single_copies: bool = False,
    ) -> int:
        """A handle for a new, empty rank. OverflowError with 65,536 slots in use. O(1)."""

    def remove_rank(self, rank: int) -> None:
        """The rank and all it held are gone. O(1)."""

    def clear_rank(self, rank: int) -> None:
        """A new lifetime: nothing of the old one is visible from now on. O(1)."""

    def sweep(self, limit: int = 2048) -> bool:
        """Dismantle up to ``limit`` blocks of dropped lifetimes; True if none are left. O(limit)."""

    def export_rank(self, rank: int) -> Iterator[Part]:
        """The rank in parts. RuntimeError if blocks came or went since the first. O(part) each."""

    def import_rank(self, rank: int) -> NativeImporter:
        """Takes parts into a rank that is still empty."""

    def apply(self, rank: int, event: Event) -> Outcome:
        """Apply one event. O(blocks in the event), amortised, plus what coverage it changes below them."""

    def forget_unlinked(self, limit: int) -> dict[int, int]:
        """Give up at most ``limit`` blocks whose parent was never announced; how many by rank. O(limit + ranks)."""

    def windows(self, rank: int) -> dict[Window, int]:
        """How the rank cuts tokens into blocks, with how many blocks of each kind it knows. O(windows)."""

    def scheme(self, rank: int) -> Scheme | None:
        """How the rank tells media apart, if that is known."""

    def counters(self, rank: int) -> dict[str, int]:
        """What was skipped or was odd, by reason, over all lifetimes."""

    def block_count(self, rank: int) -> int:
        """Blocks with at least one copy on any tier. O(1)."""

    def match(self, keys: KeySequence, ranks: Iterable[int]) -> Reaches:
        """The reach of each of these ranks; those that hold not even the first block are left out.

        Cost: ranks, and distinct reaches × log(blocks) probes per tier in use. Keys of
        :class:`protocols.keys.Keys` are hashed here from the packed tokens, no further than is looked.
        """

    def statistics(self) -> Statistics:
        """Sizes, for metrics. O(ranks)."""

    def check(self) -> list[str]:
        """Every invariant that is broken, in words; empty when sound. O(everything)."""
