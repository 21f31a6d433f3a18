"""Continuous batching over a cache: what one step computes, for whom, and what becomes of it. No time, no I/O.

As vLLM's scheduler, which SGLang's is close enough to: running requests first, each one token or a chunk of its
prefill, then waiting ones while there is budget; where the pool is full, the youngest running request gives way and
starts again from what is still cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from bench.engine.cache import Cache, Sequence


class Job:
    """One request: its sequence, how many tokens it wants, and what it has got."""

    def __init__(self, seq: Sequence, max_tokens: int, token: Callable[[int], int]) -> None:
        self.seq = seq
        self.max_tokens = max_tokens
        self._token = token
        self.produced = 0
        self.done = False

    def next_token(self) -> int:
        """The token the model would sample; decided by the prompt alone."""
        self.produced += 1
        return self._token(self.produced)


class Step(NamedTuple):
    """What one step computes: tokens per job. ``prefill`` of all its tokens are of prompts; ``context``: tokens
    attended to by the jobs that decode."""

    work: list[tuple[Job, int]]
    prefill: int
    decoding: int
    context: int


class Outcome(NamedTuple):
    """What a job got from a step."""

    job: Job
    token: int
    finished: bool


class Full(Exception):
    """The queue has no room for another request."""


class Scheduler:
    """``max_waiting`` bounds the queue, ``max_running`` the batch, ``step_tokens`` what one step may compute."""

    def __init__(self, cache: Cache, *, max_running: int, step_tokens: int, max_waiting: int) -> None:
        self.cache = cache
        self.max_running = max_running
        self.step_tokens = step_tokens
        self.max_waiting = max_waiting
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.preempted = 0

    def submit(self, job: Job) -> None:
        """Queue a job. Raises :class:`Full`."""
        if len(self.waiting) >= self.max_waiting:
            raise Full(f"{self.max_waiting} requests are waiting")
        self.waiting.append(job)

    def abort(self, job: Job) -> None:
        """Whoever asked is gone."""
        job.done = True
        if job in self.running:
            self.running.remove(job)
            self.cache.release(job.seq)
        elif job in self.waiting:
            self.waiting.remove(job)

    def schedule(self) -> Step | None:
        """The next step's work, room for it taken; None if there is nothing to do."""
        work: list[tuple[Job, int]] = []
        left = self._go_on(work)
        if len(work) == len(self.running):  # nobody had to give way: others may join
            self._join(work, left)
        if not work:
            return None
        decodes = [job for job, _ in work if job.seq.computed >= job.seq.prompt_tokens]
        return Step(
            work=work, prefill=sum(tokens for _, tokens in work) - len(decodes), decoding=len(decodes),
            context=sum(len(job.seq.chain) for job in decodes),
        )  # fmt: skip

    def _go_on(self, work: list[tuple[Job, int]]) -> int:
        left, at = self.step_tokens, 0
        while at < len(self.running) and left > 0:
            job = self.running[at]
            tokens = self.cache.chunk(job.seq, min(left, len(job.seq.chain) - job.seq.computed))
            while not self.cache.extend(job.seq, tokens):
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is job:
                    return left
            work.append((job, tokens))
            left -= tokens
            at += 1
        return left

    def _preempt(self, job: Job) -> None:
        self.running.remove(job)
        self.cache.release(job.seq, finished=False)
        job.seq.computed = 0
        self.waiting.appendleft(job)
        self.preempted += 1

    def _join(self, work: list[tuple[Job, int]], left: int) -> None:
        while self.waiting and left > 0 and len(self.running) < self.max_running:
            job = self.waiting[0]
            tokens = self.cache.admit(job.seq, left)
            if tokens is None:
                return
            self.waiting.popleft()
            self.running.append(job)
            work.append((job, tokens))
            left -= tokens

    def complete(self, step: Step) -> list[Outcome]:
        """The step is done: a token for each job that is all computed; ended ones give up their blocks."""
        outcomes = []
        for job, tokens in step.work:
            if job.done:
                continue
            job.seq.computed += tokens
            whole = job.seq.computed == len(job.seq.chain)
            self.cache.settle(job.seq)
            if not whole:
                continue
            token = job.next_token()
            finished = job.produced >= job.max_tokens
            if finished:
                job.done = True
                self.running.remove(job)
                self.cache.release(job.seq)
            else:
                job.seq.chain.tokens.append(token)
            outcomes.append(Outcome(job, token, finished))
        return outcomes
