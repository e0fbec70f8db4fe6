"""The cores of a simulated node, shared as kernels share them: the job that has computed least gets a core, for at most one slice.

So a learner that mostly waits is served before actors that always compute. A job that gets a core after another one finds cold
caches (`turn`), and all cores are slower when all are busy (`full_speed`).
"""

from __future__ import annotations

import heapq
import math

__all__ = ["SLICE", "Cores"]

SLICE = 0.004            # s; how long a process keeps a core that others want: Linux looks at every tick, 250 times a second
DONE = 1e-9              # s; work that is left because numbers are rounded


class Cores:
    """Virtual time runs at the speed of a busy core, so a job ends when virtual time has grown by its work."""

    def __init__(self, cores: int, full_speed: float, turn: float = 0.0) -> None:
        self.cores, self.full_speed, self.turn = cores, full_speed, min(turn, SLICE / 2)  # or no job would make progress
        self.running: list[tuple[float, int]] = []  # (virtual time at which it ends, or has to look up, who)
        self.ready: list[tuple[float, int, int]] = []  # (what it has computed so far, order of coming, who): least first
        self.left: dict[int, float] = {}            # work, when it continued
        self.since: dict[int, float] = {}           # virtual time of that
        self.began: dict[int, float] = {}           # virtual time at the beginning of its slice
        self.holder: int | None = None              # has a core and has just done its work
        self.computed: dict[int, float] = {}        # in all; a job that has slept starts level with the next one
        self.asked: dict[int, float] = {}           # when it asked, if it has not had a core since
        self.late: dict[int, float] = {}            # how long it then took
        self.place: dict[int, int] = {}             # its core, now or lately
        self.free = list(range(cores))
        self.warm: list[int | None] = [None] * cores  # whose caches these are
        self.virtual = self.last = self.rate = self.least = 0.0
        self.stamp = self.count = 0
        self.used = self.waiting = self.work = 0.0  # core seconds, seconds of all jobs together, work done
        self.turns = 0                              # of actors that got a core after another job

    def advance(self, now: float) -> None:
        elapsed, n = now - self.last, len(self.running)
        if n and elapsed > 0:
            self.virtual += self.rate * elapsed
            self.used += n * elapsed
            self.waiting += (n + len(self.ready)) * elapsed
        self.last = now

    def add(self, who: int, work: float) -> None:
        """Work that begins now: at once if a core is free or still its own, else when it is its turn."""
        self.left[who] = work
        self.work += work
        if who == self.holder:
            self.holder = None
            self._go_on(who)
            return
        self.computed.setdefault(who, 0.0)
        if self.free:
            self._run(who)
            return
        if not self.ready:
            self._level()
        self.computed[who] = max(self.computed[who], self.least)
        self.asked[who] = self.last
        self._queue(who)

    def _level(self) -> None:
        """Called when the first job has to wait: until now no job was held back, so those that run are set level."""
        self.least = max([self.least, *(self.computed[one] + self.virtual - self.since[one] for _, one in self.running)])
        for _, one in self.running:
            self.computed[one] = self.least - (self.virtual - self.since[one])
        self.running = [(min(end, max(self.virtual, self.began[one] + SLICE)), one) for end, one in self.running]
        heapq.heapify(self.running)

    def _queue(self, who: int) -> None:
        self.count += 1
        heapq.heappush(self.ready, (self.computed[who], self.count, who))

    def pop(self) -> int | None:
        """The job whose work is done; it keeps its core until release() in case it has more. None: a slice is over."""
        _, who = heapq.heappop(self.running)
        done = self.virtual - self.since[who]
        self.left[who] -= done
        self.computed[who] += done
        if self.left[who] <= DONE:
            self.holder = who
            return who
        if self.ready and self.ready[0][0] <= self.computed[who]:
            self._queue(who)
            self._leave(who)
        else:
            self.began[who] = self.virtual
            self._go_on(who)
        return None

    def release(self) -> None:
        """Pass on the core of the job that was done and has not begun more."""
        if self.holder is not None:
            who, self.holder = self.holder, None
            self._leave(who)

    def _leave(self, who: int) -> None:
        self.free.append(self.place[who])
        if self.ready:
            computed, _, following = heapq.heappop(self.ready)
            self.least = max(self.least, computed)
            if following in self.asked:
                self.late[following] = self.last - self.asked.pop(following)
            self._run(following)

    def _run(self, who: int) -> None:
        """On the core that has its caches, if that is free; otherwise preferably on one that no job has used."""
        core = self.place.get(who, -1)
        if core not in self.free:
            core = next((one for one in self.free if self.warm[one] is None), self.free[-1])
        self.free.remove(core)
        if self.warm[core] not in (None, who):
            self.left[who] += self.turn
            self.turns += who >= 0
        self.place[who], self.warm[core], self.began[who] = core, who, self.virtual
        self._go_on(who)

    def _go_on(self, who: int) -> None:
        self.since[who] = self.virtual
        due = self.virtual + self.left[who]
        if self.ready:
            due = min(due, max(self.virtual, self.began[who] + SLICE))
        heapq.heappush(self.running, (due, who))

    def reprice(self) -> float:
        """After a change: the speed of a busy core, and when the next one will be done."""
        busy = len(self.running)
        self.stamp += 1
        if not busy:
            return math.inf
        crowded = (busy - 1) / (self.cores - 1) if self.cores > 1 else 1.0
        self.rate = 1 - (1 - self.full_speed) * crowded
        return self.last + max(0.0, self.running[0][0] - self.virtual) / self.rate
