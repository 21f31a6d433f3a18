"""A fleet of simulated engines, everything that can go wrong between them and kvd, and the one rule that must hold.

One seed is one history: which engines there are, what they serve, what breaks and when. The clock is moved by hand.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator

import msgspec

from kvd.core.fleet import Fleet
from kvd.core.image import Part
from kvd.core.score import score
from kvd.core.signals import Remembered
from kvd.core.stream import Policy, State
from kvd.ingest.feed import Feed
from kvd.ingest.transport import Transport
from protocols.plan import exact_plan
from protocols.query import WorkerScore, WorkerSpec
from tests.kit.engine import Dialect, Engine, Space, Tokens, Truth
from tests.kit.faults import (
    ClockJump,
    CutReplay,
    DeadReplay,
    Delivered,
    EndlessReplay,
    Fault,
    GapTransport,
    GarbageEngine,
    ReorderingTransport,
    RestartingEngine,
    SilentReplay,
    StalledSubscriber,
    Wire,
)

POLICY = Policy(
    connect_timeout=5, replay_timeout=2, replay_total=12, replay_attempts=3, probe_interval=8, held_messages=40,
    evidence=200, conflict_pause=20,
)  # fmt: skip
QUIET_SECONDS = 80.0
"""Longer than every deadline of the policy after one another."""

SPACES = (Space(), Space(), Space(), Space("adapter"), Space(None, "tenant"), Space("adapter", "tenant"))
REPAIRABLE = (GapTransport, StalledSubscriber, ReorderingTransport)
"""Faults after which nothing may be missing, given a publisher that still has its history."""
EVERY_FAULT = (*REPAIRABLE, GarbageEngine, SilentReplay, DeadReplay, EndlessReplay, CutReplay)

Prompt = tuple[Tokens, Space]


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of trouble a world has."""

    faults: tuple[type[Fault], ...] = EVERY_FAULT
    replay: float = 0.85
    """Share of engines with a replay endpoint."""
    prompt_replay: bool = False
    """Replays are answered before a deadline can pass."""
    short_buffers: bool = True
    hidden_restarts: bool = True
    max_blocks: int = 1 << 40
    """So few that streams must give way to others; then nothing is promised but the rule."""


MENDABLE = Profile(faults=REPAIRABLE, replay=1.0, prompt_replay=True, short_buffers=False)
"""Everything that is lost can be had again: no stream may stay incomplete."""
CROWDED = Profile(max_blocks=60)


def prompts(rng: random.Random, count: int = 24) -> list[Prompt]:
    """Prompts that share prefixes, as conversations do; some of exactly so many blocks, some shorter than one."""
    roots = [tuple(rng.randrange(1, 50_000) for _ in range(56)) for _ in range(4)]
    found: list[Prompt] = []
    for _ in range(count):
        root, space = rng.choice(roots), rng.choice(SPACES)
        shared = rng.choice((0, 4, 8, 16, 24, 32, 40))
        own = rng.choice((0, 2, 3, 4, 8, 11, 16))
        found.append(((*root[:shared], *(rng.randrange(1, 50_000) for _ in range(own))) or root[:3], space))
    return found


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot keeps of a stream; ``life`` is the process it was of."""

    position: Remembered
    parts: list[Part]
    life: int


class Worker:
    """One engine, the wire to kvd with every fault on it, and kvd's side of the stream."""

    def __init__(self, world: World, name: str, engine: Engine, *, replayable: bool) -> None:
        self.world = world
        self.name = name
        self.engine = engine
        self.replayable = replayable
        self.unheard = False
        self.orderly = world.random.random() < 0.6
        self.restarts = RestartingEngine(Wire(engine), world.random)
        self.image: Image | None = None
        self.join(None)

    def join(self, image: Image | None) -> None:
        """Be added to the fleet, with a stream that knows nothing, or what an image of an earlier one kept."""
        world = self.world
        replay = "inproc://replay" if self.replayable else None
        spec = WorkerSpec(name=self.name, model="m", endpoint="inproc://events", replay=replay)
        remembered = None if image is None else {0: image.position}
        (self.member,) = world.fleet.add(spec, world.now, POLICY, remembered)
        if image is not None:
            self._fill_shadow(image)
        self.wire = self.restarts.wire = Wire(self.engine)
        top: Transport = self.wire
        self.faults: list[Fault] = []
        for kind in world.profile.faults:
            if kind is (GarbageEngine, ReorderingTransport)[self.orderly]:
                continue  # out of order, only its clock tells whose a message is, and nonsense has none
            self.faults.append(kind(top, world.random))
            top = self.faults[-1]
        self.tap = Delivered(top, world.random, self.engine, lambda: self.member.stream, image and image.life)
        self.feed = Feed(self.member, self.tap, lambda: world.now)
        self.feed.open()

    def _fill_shadow(self, image: Image) -> None:
        member = self.member
        member.shadow = member.new_handle()
        importer = member.index.import_rank(member.shadow)
        for part in image.parts:
            importer.take(part)
        importer.finish()

    def keep(self) -> None:
        """Take an image of the stream as a snapshot would, if there is anything to keep."""
        position = self.member.stream.position
        if position is not None:
            parts = list(self.member.index.export_rank(self.member.handle))
            self.image = Image(position=position, parts=parts, life=self.tap.newest[0])

    def leave(self) -> None:
        self.world.fleet.remove(self.name)
        self.feed.close()

    # --- what the engine does ---

    def send(self) -> None:
        sent = self.engine.step()
        if not self.unheard:
            self.wire.publish(sent)

    def serve(self, prompt: Prompt) -> None:
        engine = self.engine
        while engine.running and (len(engine.running) > 3 or self.world.random.random() < 0.4):
            engine.finish(self.world.random.randrange(len(engine.running)))
        if engine.serve(*prompt) is None:
            self.finish()
            engine.serve(*prompt)
        self.send()

    def finish(self) -> None:
        while self.engine.running:
            self.engine.finish()

    def reset(self) -> None:
        self.finish()
        self.engine.reset()
        if self.engine.dialect is Dialect.SGLANG:
            self.send()

    def restart(self, *, noticed: bool) -> None:
        if not noticed:
            self.in_order()  # what the old process sent arrives before anything of the new one
        self.restarts.restart(noticed=noticed)
        self.unheard = not noticed and self.world.random.random() < 0.5
        beyond = (self.member.stream.last or 0) + 3 if self.unheard else self.world.random.choice((0, 0, 1, 4))
        for _ in range(2 * beyond):  # before anybody listens: what a slow joiner misses, or more than it ever heard
            if self.engine.seq < beyond:
                self.serve(self.world.random.choice(self.world.prompts))
        self.unheard = False

    def in_order(self) -> None:
        """Whatever is held up arrives before anything else is sent."""
        for fault in self.faults:
            if isinstance(fault, (StalledSubscriber, ReorderingTransport)):
                fault.calm()

    # --- what kvd knows ---

    def truth(self, prompt: Prompt) -> Truth:
        """What the engine held when the newest message that kvd was given left."""
        life, seq = self.tap.newest
        return self.engine.truth_at(life, seq, *prompt)


class World:
    """Engines, kvd and the trouble between them, from one seed."""

    def __init__(self, seed: int, profile: Profile) -> None:
        self.seed = seed
        self.profile = profile
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.seen: Counter[str] = Counter()
        self.log: deque[str] = deque(maxlen=60)
        self.fleet = Fleet(max_blocks=profile.max_blocks)
        self.clocks = ClockJump(self.random)
        self.prompts = prompts(self.random)
        self.workers = [self._worker(number) for number in range(self.random.randint(3, 6))]

    def _worker(self, number: int) -> Worker:
        rng = self.random
        dialect = list(Dialect)[number % len(Dialect)]
        engine = Engine(
            dialect, blocks=rng.choice((24, 40, 80)), block_size=rng.choice((4, 4, 8)),
            host=rng.choice((0, 20)) if dialect in (Dialect.SGLANG, Dialect.VLLM_MAP) else 0,
            hybrid=rng.random() < 0.4, buffer=rng.choice((8, 40)) if self.profile.short_buffers else 100_000,
            same_hashes=rng.random() < 0.6, seed=rng.randrange(1 << 30),
        )  # fmt: skip
        return Worker(self, f"w{number}", engine, replayable=rng.random() < self.profile.replay)

    # --- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Something happens to one worker, and the rule still holds."""
        self.steps += 1
        worker = self.random.choice(self.workers)
        action = self.random.choices(ACTIONS, WEIGHTS)[0]
        self.note(f"{worker.name} {action.__name__}")
        action(self, worker)
        for fault in worker.faults:
            fault.stir()
        self.hold(self.random.choice(self.prompts))

    def note(self, text: str) -> None:
        self.log.append(f"{self.steps} t={self.now:.2f} {text}")

    def serve(self, worker: Worker) -> None:
        worker.serve(self.random.choice(self.prompts))

    def deliver(self, worker: Worker) -> None:
        worker.wire.deliver(self.random.randint(1, 6))

    def answer(self, worker: Worker) -> None:
        worker.wire.answer(self.random.randint(1, 12), end=self.random.random() < 0.9)

    def tick(self, worker: Worker) -> None:
        self._pass(self.random.choice((0.1, 0.5, 1.0, 3.0)))
        for each in self.workers:
            each.feed.tick()
        worker.wire.connect(late_monitor=self.random.random() < 0.3)

    def toggle(self, worker: Worker) -> None:
        fault = self.random.choice(worker.faults)
        if fault.active:
            fault.calm()
        else:
            fault.active = True
        self.note(f"{worker.name} {type(fault).__name__} {'on' if fault.active else 'off'}")

    def blip(self, worker: Worker) -> None:
        """The connection breaks; the engine lives on."""
        worker.wire.disconnect(lost=self.random.random() < 0.5)

    def restart(self, worker: Worker) -> None:
        """Hidden only while no replay runs: one that another process goes on with mixes what is held and replayed."""
        hidden = self.profile.hidden_restarts and worker.member.stream._replay is None
        worker.restart(noticed=not hidden or self.random.random() < 0.7)

    def reset(self, worker: Worker) -> None:
        worker.reset()

    def engine_clock(self, worker: Worker) -> None:
        """On an unordered transport only this clock tells a late message from another process: not both at once."""
        worker.in_order()
        worker.wire.deliver(1 << 30)
        self.clocks.shift(worker.engine)

    def own_clock(self, worker: Worker) -> None:
        del worker
        self._pass(self.clocks.leap())

    def _pass(self, seconds: float) -> None:
        for worker in self.workers:
            if self.profile.prompt_replay:
                worker.wire.answer(1 << 30)
        self.now += seconds

    def rejoin(self, worker: Worker) -> None:
        self._rejoin(worker, None)

    def _rejoin(self, worker: Worker, image: Image | None) -> None:
        worker.leave()
        self.fleet.sweep(self.random.choice((1, 1 << 20)))
        worker.join(image)

    def snapshot(self, worker: Worker) -> None:
        worker.keep()

    def warm_start(self, worker: Worker) -> None:
        """kvd begins anew, as far as this worker goes, with the snapshot it has, however old that is."""
        if worker.image is not None:
            self._rejoin(worker, worker.image)

    # --- the rule ----------------------------------------------------------------------------------------------------

    def scores(self, prompt: Prompt) -> Iterator[tuple[Worker, WorkerScore]]:
        tokens, space = prompt
        plan = exact_plan("m", tokens, lora_name=space.lora, cache_salt=space.salt)
        by_name = {worker.name: worker for worker in self.workers}
        for found in score(self.fleet, plan, None, self.now).workers:
            yield by_name[found.worker], found

    def hold(self, prompt: Prompt) -> None:
        """No worker that is called exact is said to hold more than it held at the last message given to kvd."""
        for worker, found in self.scores(prompt):
            self.seen[found.trust.state] += 1
            if found.trust.state != "exact":
                continue
            claimed, truth = claim(found), worker.truth(prompt)
            assert all(c <= t for c, t in zip(claimed, truth, strict=True)), self.story(worker, claimed, truth, prompt)
            assert worker.member.stream.last in (worker.tap.newest[1], None), self.story(worker, claimed, truth, prompt)

    def story(self, worker: Worker, claimed: object, truth: object, prompt: Prompt) -> str:
        stream = worker.member.stream
        return "\n".join((
            f"seed {self.seed}, step {self.steps}: {worker.name} ({worker.engine.dialect.value}) claims {claimed}, "
            f"truth {truth} at {worker.tap.newest} for {prompt}",
            f"state {stream.state} trust {stream.trust(self.now)} lifetime {stream.lifetime} last {stream.last} "
            f"engine {worker.engine.life, worker.engine.seq} {stream.counters}",
            *self.log,
        ))  # fmt: skip

    # --- quiet -------------------------------------------------------------------------------------------------------

    def quiet(self) -> None:
        """The trouble ends: every stream finds the truth again, by itself or with the engine's next clear."""
        self.note("quiet")
        self._calm()
        self._settle(QUIET_SECONDS)
        for worker in self.workers:
            if not worker.replayable or not worker.engine.seq:
                self._speak(worker)  # a lost tail without a replay, or a hidden restart, shows with the next message
        self._settle(1.0)
        if self.profile is not CROWDED:
            self._mend()
            for worker in self.workers:
                self._assert_true(worker)
        assert self.fleet.check() == []

    def _speak(self, worker: Worker) -> None:
        """Serve until there is something to say: hits and short prompts are silent."""
        before = worker.engine.seq
        while worker.engine.seq == before:
            worker.serve((tuple(self.random.randrange(1, 50_000) for _ in range(16)), Space()))

    def _calm(self) -> None:
        for worker in self.workers:
            for fault in reversed(worker.faults):
                fault.calm()
            worker.wire.connect()

    def _settle(self, seconds: float) -> None:
        """Everything on the way arrives, every question is answered, every deadline passes."""
        for _ in range(round(seconds * 2)):
            for worker in self.workers:
                worker.wire.deliver(1 << 30)
                worker.wire.answer(1 << 30)
                worker.feed.tick()
            self.now += 0.5
        self.hold(self.random.choice(self.prompts))

    def _mend(self) -> None:
        """Streams that lost something for good say so; a clear makes them whole."""
        broken = [worker for worker in self.workers if worker.member.stream.trust(self.now).state != "exact"]
        self.seen["whole"] += len(self.workers) - len(broken)
        self.seen["mended"] += len(broken)
        for worker in broken:
            stream = worker.member.stream
            assert stream.state is State.INCOMPLETE, self.story(worker, "not settled", "", self.prompts[0])
            assert self.profile is not MENDABLE, self.story(worker, "lost for good", "", self.prompts[0])
            worker.reset()
            self._speak(worker)
        self._settle(2.0)

    def _assert_true(self, worker: Worker) -> None:
        stream, engine = worker.member.stream, worker.engine
        for prompt in self.prompts:
            found = next(score_ for each, score_ in self.scores(prompt) if each is worker)
            truth = engine.truth_at(engine.life, engine.seq - 1, *prompt)
            said = (stream.state, found.trust.state, claim(found))
            assert said == (State.LIVE, "exact", truth), self.story(worker, said, truth, prompt)


def claim(found: WorkerScore) -> Truth:
    """A score in the terms of the engine's truth."""
    size = found.block_size or 1
    return Truth(found.matched_blocks, found.tier_tokens["host"] // size, found.usable_tokens // size)


Action = Callable[[World, Worker], None]
_WEIGHTED: dict[Action, float] = {
    World.serve: 40, World.deliver: 25, World.answer: 14, World.tick: 12, World.toggle: 4, World.blip: 1.2,
    World.restart: 0.8, World.reset: 1, World.engine_clock: 0.4, World.own_clock: 0.2, World.rejoin: 0.3,
    World.snapshot: 1, World.warm_start: 0.6,
}  # fmt: skip
ACTIONS, WEIGHTS = list(_WEIGHTED), list(_WEIGHTED.values())
