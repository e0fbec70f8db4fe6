"""A discrete-event model of actors and learners: env steps/s, learner idle and lag on machines that are not there.

    actor    waits for a free slot ─▶ takes the node's newest weights ─▶ computes an unroll on a core, and waits for its
             environments ─▶ sends the slot (over the learner's link if it lives elsewhere) ─▶ again
    learner  copies slots as they come ─▶ when it has a batch, waits for the other learners ─▶ update ─▶ the first one publishes

In lock step (synchronous) a batch has one slot of every actor, and an actor that has served every learner waits for new weights.
The rules are those of the wires: `depth` slots for each pair of actor and learner, an actor serves learners in turns and blocks
when none has a free slot, slots are freed as soon as they are copied, weights are fetched once per node and version and the
latest wins. An unroll is computed and waited for in pieces, since an actor that waits for its environments leaves its core to
others many times in an unroll. simulated_cores.py says how a node's cores are shared. Nothing is measured here: see measure.py.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import replace

from shoal.planning.simulated_cores import Cores
from shoal.planning.terms import Cluster, Cost, Costs, Forecast, bottleneck

__all__ = ["simulate"]

JITTER = 0.005           # spread of an unroll's time at the least, so that actors do not march in step
PIECES = 8               # in which an unroll computes and waits in turns, where cores are short
LINK_LATENCY = 2e-4      # s; between nodes
FULL_AT = 1.1            # supply over demand, from which the queues are taken to be full at the beginning
LEARNER = ("get", "update", "reduce", "publish")
COMPUTED, WAITED, ARRIVED, FETCHED = range(4)


class Node(Cores):
    """A machine: its cores, and the weights that it has."""

    version = 0
    fetching = False


class Simulation:
    """One size, from empty (or full) queues until enough unrolls have been learned from."""

    def __init__(self, costs: Costs, cluster: Cluster, actors: int, learners: int, batch: int, depth: int, lockstep: bool,
                 seed: int) -> None:
        self.costs, self.cluster, self.N, self.L, self.batch, self.lockstep = costs, cluster, actors, learners, batch, lockstep
        self.now, self.sequence = 0.0, 0
        self.events: list[tuple[float, int, int, int, int]] = []
        self.rng = random.Random(seed)
        apart = cluster.nodes > 1
        own = min(math.ceil(learners / cluster.cores_per_node), cluster.nodes - 1) if apart else 0
        self.nodes = [Node(cluster.cores_per_node, costs.full_speed, costs.turn) for _ in range(cluster.nodes)]
        self.actor_node = [own + a % (cluster.nodes - own) for a in range(actors)]
        self.learner_node = [k % max(1, own) for k in range(learners)]
        self.remote = [apart] * actors
        # actors
        self.free = [depth] * (actors * learners)
        self.turn = [a % learners for a in range(actors)]
        self.target, self.held_version, self.used_version = [0] * actors, [-1] * actors, [0] * actors
        crowd = math.ceil(actors / (cluster.nodes - own)) + (0 if apart else learners)
        self.pieces = PIECES if costs.unroll.wait and crowd > cluster.cores_per_node else 1  # no difference where cores are free
        self.pace, self.piece = [1.0] * actors, [0] * actors
        self.stalled = [False] * actors
        self.stalled_count = 0
        self.sent = [0] * actors  # with these weights, in lock step
        self.patient: list[list[int]] = [[] for _ in self.nodes]  # actors that wait for the next
        # learners
        self.queue: list[deque[tuple[int, int]]] = [deque() for _ in range(learners)]
        self.taking: list[list[tuple[int, int]]] = [[] for _ in range(learners)]
        self.taken: list[list[int]] = [[] for _ in range(learners)]
        self.stage = ["idle"] * learners
        self.since, self.woken = [0.0] * learners, [True] * learners
        self.spent = dict.fromkeys((*LEARNER, "idle", "meet"), 0.0)
        self.arrived = 0  # learners at the barrier
        self.version = 1
        # links
        self.link_in = [0.0] * max(1, own)
        self.link_out = 0.0
        self.link_in_used, self.link_out_used = [0.0] * max(1, own), 0.0
        # books
        self.consumed, self.in_system = 0, 0
        self.area_system = self.area_stalled = self.last_area = 0.0
        self.lags = self.stale = 0.0
        self.lag_count = self.begun = 0

    # ------------------------------------------------------------------ time
    def push(self, when: float, kind: int, who: int, what: int = 0) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (when, self.sequence, kind, who, what))

    def compute(self, node_number: int, who: int, work: float) -> None:
        node = self.nodes[node_number]
        node.advance(self.now)
        node.add(who, work)
        self.push(node.reprice(), COMPUTED, node_number, node.stamp)

    def account(self) -> None:
        elapsed = self.now - self.last_area
        self.area_system += elapsed * self.in_system
        self.area_stalled += elapsed * self.stalled_count
        self.last_area = self.now

    def run(self, unrolls: int) -> None:
        """Simulate until this many more unrolls have been learned from."""
        until = self.consumed + unrolls
        while self.consumed < until:
            self.now, _, kind, who, what = heapq.heappop(self.events)
            if kind == COMPUTED:
                node = self.nodes[who]
                if what != node.stamp:
                    continue  # another job has come or gone since
                node.advance(self.now)
                job = node.pop()
                if job is not None:
                    self._computed(job)
                    node.release()
                when = node.reprice()
                if when < math.inf:
                    self.push(when, COMPUTED, who, node.stamp)
            elif kind == WAITED:
                self._done(who)
            elif kind == ARRIVED:
                actor, learner = divmod(who, self.L)  # which has long since begun an unroll for another one
                self._arrive(learner, actor, what)
            else:
                self.nodes[who].version, self.nodes[who].fetching = what, False
                self._resume(who)

    # ------------------------------------------------------------------ actors (jobs 0 .. N - 1)
    def begin(self, actor: int) -> None:
        """A slot, the newest weights, an unroll."""
        first = actor * self.L
        for step in range(self.L):
            k = (self.turn[actor] + step) % self.L
            if self.free[first + k]:
                break
        else:
            self.account()
            self.stalled[actor] = True
            self.stalled_count += 1
            return
        self.free[first + k] -= 1
        self.turn[actor], self.target[actor] = (k + 1) % self.L, k
        self.account()
        self.in_system += 1
        self.begun += 1
        version = self._weights(actor)
        self.stale += self.version - version
        self.pace[actor], self.piece[actor] = self._spread(), self.pieces
        work = self._part(actor, self.costs.unroll.cpu)
        if version != self.held_version[actor]:
            self.held_version[actor] = version
            work += self.costs.pull.cpu
        self.used_version[actor] = version
        self.compute(self.actor_node[actor], actor, work)

    def _resume(self, number: int) -> None:
        """In lock step, all of a node that wait for new weights: as soon as they are there."""
        patient = self.patient[number]
        if patient and self._weights(patient[0]) == self.version:
            self.patient[number] = []
            for actor in patient:
                self.sent[actor] = 0
                self.begin(actor)

    def _weights(self, actor: int) -> int:
        """The newest version on the actor's node; one that is behind has it sent, for all who live there."""
        if not self.remote[actor]:
            return self.version
        number = self.actor_node[actor]
        node = self.nodes[number]
        if node.version == 0:
            node.version = self.version  # all nodes begin with the first weights
        if node.version < self.version and not node.fetching:
            node.fetching = True
            seconds = self.cluster.seconds(self.costs.weights_bytes)
            self.link_out = max(self.link_out, self.now) + seconds
            self.link_out_used += seconds
            self.push(self.link_out + LINK_LATENCY, FETCHED, number, self.version)
        return node.version

    def _spread(self) -> float:
        """How long one unroll takes, compared with the others."""
        shape = max(self.costs.spread, JITTER) ** -2
        return self.rng.gammavariate(shape, 1 / shape)

    def _part(self, actor: int, seconds: float) -> float:
        return seconds * self.pace[actor] / self.pieces

    def _computed(self, job: int) -> None:
        if job < 0:
            wait = getattr(self.costs, self.stage[-job - 1]).wait
            if self.stage[-job - 1] == "get":
                wait *= len(self.taking[-job - 1])
        else:
            wait = self._part(job, self.costs.unroll.wait)
        if wait > 0:
            self.push(self.now + wait, WAITED, job)
        else:
            self._done(job)

    def _done(self, job: int) -> None:
        if job < 0:
            self._learned(-job - 1)
            return
        self.piece[job] -= 1
        if self.piece[job] > 0:
            self.compute(self.actor_node[job], job, self._part(job, self.costs.unroll.cpu))
            return
        version, learner = self.used_version[job], self.target[job]
        if self.remote[job]:
            link, seconds = self.learner_node[learner], self.cluster.seconds(self.costs.slot_bytes)
            self.link_in[link] = max(self.link_in[link], self.now) + seconds
            self.link_in_used[link] += seconds
            self.push(self.link_in[link] + LINK_LATENCY, ARRIVED, job * self.L + learner, version)
            # A slot on its way is not written to: the next unroll waits for its own turn with another slot.
        else:
            self._arrive(learner, job, version)
        self.sent[job] += 1
        if self.lockstep and self.sent[job] >= self.L:
            self.patient[self.actor_node[job]].append(job)
        else:
            self.begin(job)

    # ------------------------------------------------------------------ learners (jobs -1 .. -L)
    def _arrive(self, learner: int, actor: int, version: int) -> None:
        self.queue[learner].append((actor, version))
        if self.stage[learner] == "idle":
            self._gather(learner)

    def _enter(self, learner: int, stage: str) -> None:
        self.spent[self.stage[learner]] += self.now - self.since[learner]
        self.woken[learner] = self.stage[learner] in ("idle", "meet")
        self.stage[learner], self.since[learner] = stage, self.now

    def _gather(self, learner: int) -> None:
        missing, queue = self.batch - len(self.taken[learner]), self.queue[learner]
        if not queue:
            self._enter(learner, "idle")
            return
        self.taking[learner] = [queue.popleft() for _ in range(min(missing, len(queue)))]
        self._enter(learner, "get")
        self.compute(self.learner_node[learner], -learner - 1, self.costs.get.cpu * len(self.taking[learner]))

    def _learned(self, learner: int) -> None:
        """The end of a stage. A role that was woken for it and did not get a core at once was idle until then."""
        stage = self.stage[learner]
        late = self.nodes[self.learner_node[learner]].late.pop(-learner - 1, 0.0)
        if self.woken[learner]:
            self.spent[stage] -= late
            self.spent["idle"] += late
        if stage == "get":
            self._got(learner)
        elif stage == "update":
            self._meet(learner, "reduce" if self.L > 1 else "publish")
        elif stage == "reduce":
            self._meet(learner, "publish")
        else:
            self.version += 1
            for number in range(len(self.nodes)):
                self._resume(number)
            self._gather(learner)

    def _got(self, learner: int) -> None:
        for actor, version in self.taking[learner]:
            self.free[actor * self.L + learner] += 1
            self.taken[learner].append(version)
            if self.stalled[actor]:
                self.account()
                self.stalled[actor] = False
                self.stalled_count -= 1
                self.begin(actor)
        self.taking[learner] = []
        if len(self.taken[learner]) < self.batch:
            self._gather(learner)
            return
        self.account()
        self.in_system -= self.batch
        self.consumed += self.batch
        for version in self.taken[learner]:
            if version > 0:
                self.lags += self.version - version
                self.lag_count += 1
        self.taken[learner] = []
        self._meet(learner, "update")

    def _meet(self, learner: int, then: str) -> None:
        """A barrier of all learners; what comes after it is the same for all, but only the first one publishes."""
        self._enter(learner, "meet")
        self.arrived += 1
        if self.arrived < self.L:
            return
        self.arrived = 0
        for learner in range(self.L):
            if then == "publish" and learner:
                self._gather(learner)
                continue
            cost: Cost = getattr(self.costs, then)
            self._enter(learner, then)
            self.compute(self.learner_node[learner], -learner - 1, cost.cpu)

    # ------------------------------------------------------------------ from the beginning to an answer
    def fill(self, depth: int) -> None:
        """All queues full: where actors outrun learners it would take long to get there."""
        for learner in range(self.L):
            order = list(range(self.N))
            self.rng.shuffle(order)
            self.queue[learner].extend((actor, -1) for _ in range(depth) for actor in order)
        self.free = [0] * len(self.free)
        self.in_system = self.N * self.L * depth

    def reset_books(self) -> None:
        self.account()
        self.area_system = self.area_stalled = 0.0
        self.lags = self.stale = 0.0
        self.lag_count = self.begun = 0
        self.spent = dict.fromkeys(self.spent, 0.0)
        self.since = [self.now] * self.L
        self.link_in_used, self.link_out_used = [0.0] * len(self.link_in_used), 0.0
        for node in self.nodes:
            node.advance(self.now)
            node.used = node.waiting = node.work = 0.0
            node.turns = 0


def simulate(costs: Costs, cluster: Cluster, actors: int, learners: int = 1, batch: int = 2, depth: int = 2, *,
             lockstep: bool = False, seed: int = 0) -> Forecast:
    """What `actors` and `learners` would do there. `batch` slots make an update of one learner (in lock step: one of every actor),
    `depth` slots lie between each actor and each learner."""
    batch = actors if lockstep else batch
    costs = _joined(costs, cluster, learners)
    costs = replace(costs, update=costs.update + costs.update_slot.times(batch))
    sim = Simulation(costs, cluster, actors, learners, batch, depth, lockstep, seed)
    alone = costs.unroll
    supply = min(actors / (alone.cpu + alone.wait),
                 cluster.nodes * cluster.cores_per_node * costs.full_speed / max(alone.cpu, 1e-12))
    one = costs.get.times(batch) + costs.update + costs.publish
    if not lockstep and supply > FULL_AT * learners * batch / (one.cpu + one.wait):
        sim.fill(depth)
    for learner in range(learners):
        sim._gather(learner)
    for actor in range(actors):
        if sim.free[actor * learners]:
            sim.push(sim.rng.random() * (alone.cpu + alone.wait), WAITED, actor)
            sim.free[actor * learners + sim.turn[actor]] -= 1  # in the middle of its first unroll
            sim.target[actor], sim.used_version[actor] = sim.turn[actor], 1
            sim.in_system += 1
        else:
            sim.begin(actor)
    whole = actors * learners  # unrolls of a round, in lock step
    rounds = max(1, min(20, 100_000 // whole))
    sim.run(whole if lockstep else max(2 * actors, 10 * batch * learners, 200))
    sim.reset_books()
    began, before = sim.now, sim.consumed
    sim.run(rounds * whole if lockstep else max(3 * actors, 30 * batch * learners, 600))
    return _forecast(sim, sim.now - began, sim.consumed - before)


def _joined(costs: Costs, cluster: Cluster, learners: int) -> Costs:
    """What sharing gradients takes in all: on one node each learner adds up all of them; nodes pass sums round in a ring."""
    there = 1 if cluster.nodes == 1 else math.ceil(learners / cluster.cores_per_node)
    shared = costs.reduce.times(min(learners, cluster.cores_per_node if there > 1 else learners) - 1)
    if there > 1:
        travel = 2 * cluster.seconds(costs.weights_bytes) + 2 * (there - 1) * LINK_LATENCY
        shared += Cost(2 * costs.reduce.cpu, travel)
    return replace(costs, reduce=shared)


def _forecast(sim: Simulation, seconds: float, unrolls: int) -> Forecast:
    sim.account()
    for learner in range(sim.L):
        sim._enter(learner, sim.stage[learner])
    for node in sim.nodes:
        node.advance(sim.now)
    rate, updates = unrolls / seconds, unrolls / seconds / sim.batch / sim.L
    shares = {name: spent / seconds / sim.L for name, spent in sim.spent.items()}
    idle = shares.pop("idle") + shares.pop("meet")
    # Little's law where the unrolls at hand are still those of the beginning; else as it was seen.
    stale = sim.stale / sim.begun if sim.begun else 0.0
    lag = sim.lags / sim.lag_count if sim.lag_count > unrolls / 2 else stale + updates * sim.area_system / seconds / rate
    acting = [sim.nodes[k] for k in sorted(set(sim.actor_node))]
    used, waiting = sum(node.used for node in acting), sum(node.waiting for node in acting)
    work = sum(node.work for node in acting)
    made = Forecast(sim.N, sim.L, sim.cluster.nodes, rate * sim.costs.decisions, idle, lag, "", sim.area_stalled / seconds / sim.N,
                    used / seconds / sum(node.cores for node in acting), waiting / used if used else 1.0, shares,
                    max(sim.link_in_used) / seconds, sim.link_out_used / seconds, used / work if work else 1.0,
                    sum(node.turns for node in acting) / unrolls)
    return replace(made, bottleneck=bottleneck(made, sim.costs, sim.lockstep))
