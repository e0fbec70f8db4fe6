"""The LeagueActor: plays the matches that the Coordinator gives it.

Every game belongs to one player of the league, its home player: the one that has had the fewest decisions to learn from, so that
all learn equally fast, whatever the length of their games and however often they play themselves. At the start of a game the actor
asks whom home plays against: another player with its newest weights, itself, or a snapshot. Home has each side in turn. Only home
learns, from both sides where it plays itself.

Only players of the line-up get games. One that leaves it finishes its games under way, and nothing of them is sent. An actor that
waits for a learner also looks whether that one still plays, so a learner that was stopped holds nobody up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from shoal.core import Call, Me, Reader, StreamEnd, any_of
from shoal.envs import MultiAgentStep
from shoal.league.matchmaking import LeaguePlan
from shoal.roles.coordinator import NOBODY
from shoal.roles.parts import Parts
from shoal.roles.policies import NamedPolicies
from shoal.roles.policy_actor import LearningSeats, PolicyActor, SeatAssigner
from shoal.roles.policy_opponent import PolicyOpponent

__all__ = ["LeagueActor"]

MOST_KEPT = 256  # snapshots that an actor holds


class LeagueActor(PolicyActor):
    """Plays matches of the league and sends each learner what its player has decided at home."""

    def __init__(self, me: Me, parts: Parts, experience: Mapping[str, StreamEnd], weights: Mapping[str, Reader], plan: LeaguePlan,
                 matches: Call, snapshots: Call, line_up: Reader) -> None:
        self.plan, self.matches, self.snapshots, self.line_up = plan, matches, snapshots, line_up
        self.playing, self.known = np.zeros(len(plan.players), bool), 0  # the line-up, and its version
        super().__init__(me, parts, experience, weights)

    def _seating(self, policies: NamedPolicies) -> SeatAssigner:
        self.seats = MatchSeats(self)
        return self.seats

    async def _prepared(self) -> list[LearningSeats]:
        await self.line_up.newer_than(0)
        while True:
            self._look_at_line_up()
            changed = self.line_up.newer_than(self.known)
            learning = [self.learning[place] for place in np.flatnonzero(self.playing).tolist()]
            for one in learning:
                await any_of(one.weights.newer_than(0), changed)
                if one.slot is None:
                    await any_of(one.sink.free(), changed)
                if changed.ready():
                    break
                await one.take_slot()
            else:
                return learning

    def _look_at_line_up(self) -> None:
        if self.line_up.version == self.known:
            return
        found = {"playing": np.zeros_like(self.playing)}
        self.known = self.line_up.pull(found)
        before, self.playing = self.playing, found["playing"]
        for place in np.flatnonzero(before & ~self.playing).tolist():
            self.learning[place].leave()
        self.seats.change(before, self.playing)


class MatchSeats:
    """Seats the players of matches. A snapshot acts from a place beyond those of the players."""

    def __init__(self, actor: LeagueActor) -> None:
        self._actor, games = actor, actor.env.num_envs
        (self._table,) = actor.tables
        self._sides, self._players = len(actor.env.agents), len(actor.plan.players)
        self._home = np.zeros(games, np.int64)
        self._begun = np.zeros(self._players, np.int64)  # games of each home player
        self._missed = np.zeros(self._players)  # decisions that the others had made before a player joined them
        self._under_way = np.zeros(self._players, np.int64)
        self._played = np.arange(games) % self._sides  # games; so that home does not begin on the same side everywhere
        self._match = np.zeros(games, np.int64)
        self._places: OrderedDict[int, int] = OrderedDict()  # snapshot -> its place, the one that was used last at the end
        self._next_place = self._players

    def change(self, before: np.ndarray, playing: np.ndarray) -> None:
        """Other players play now. One that joins is taken to be as far as the others: it is not given all games until it is. From
        the games of one that leaves nobody learns."""
        decided = self._decided()
        if (stay := before & playing).any():
            joined = playing & ~before
            self._missed[joined] += np.maximum(decided[stay].min() - decided[joined], 0)
        self._table.learns &= playing[np.minimum(self._table.acting, self._players - 1)]

    def _decided(self) -> np.ndarray:
        return np.array([self._actor.learning[place].decided for place in range(self._players)]) + self._missed

    async def begin(self, games: np.ndarray, ended: MultiAgentStep | None) -> None:
        actor, count = self._actor, len(self._match)
        request = {name: np.full(count, NOBODY, np.int64) for name in ("match", "result", "home")}
        if ended is not None:
            request["match"][games] = self._match[games]
            request["result"][games] = self._results(games, ended.returns)
            actor.me.stats.add("league_games", len(games))
            np.subtract.at(self._under_way, self._home[games], 1)
        self._choose_home(games)
        request["home"][games] = self._home[games]
        reply = await actor.matches.ask(request)
        self._match[games] = reply["match"][games]
        away, snapshots = reply["away"][games], reply["snapshot"][games]
        for snapshot in np.unique(snapshots[snapshots != NOBODY]).tolist():
            away[snapshots == snapshot] = await self._place(snapshot)
        self._seat(games, away)
        self._played[games] += 1
        self._let_go()

    def _choose_home(self, games: np.ndarray) -> None:
        """Give each game to the player that will have had the fewest decisions once the games under way are over."""
        decided = self._decided()
        over = self._begun - self._under_way
        each = np.where(over > 0, decided / np.maximum(over, 1), 1.0)  # decisions of a game
        expected = np.where(self._actor.playing, decided + each * self._under_way, np.inf).tolist()
        more = each.tolist()
        for game in games.tolist():
            self._home[game] = home = expected.index(min(expected))
            expected[home] += more[home]
        self._begun += (begun := np.bincount(self._home[games], minlength=self._players))
        self._under_way += begun

    def _results(self, games: np.ndarray, returns: np.ndarray) -> np.ndarray:
        """How the last games ended for home: 0 a win, 1 a draw, 2 a loss."""
        home = returns[np.arange(len(games)), (self._played[games] - 1) % self._sides]
        others = (returns.sum(1) - home) / (self._sides - 1)
        return np.where(home > others, 0, np.where(home == others, 1, 2))

    def _seat(self, games: np.ndarray, away: np.ndarray) -> None:
        """Home on its side, `away` (the place of a player or a snapshot) on all others."""
        rows = games[:, None] * self._sides + np.arange(self._sides)
        own, home = games * self._sides + self._played[games] % self._sides, self._home[games]
        self._table.acting[rows], self._table.learns[rows] = away[:, None], (away == home)[:, None]
        self._table.acting[own], self._table.learns[own] = home, True

    async def _place(self, snapshot: int) -> int:
        """Where a snapshot acts from; its weights are asked for when it plays here for the first time."""
        if snapshot not in self._places:
            actor = self._actor
            policy = PolicyOpponent(actor.learning[0].algorithm, self._table.group,
                                    int(actor.me.rng(str(snapshot)).integers(2**31)), greedy=False)
            policy.load(await actor.snapshots.ask({"snapshot": np.array([snapshot])}))
            self._places[snapshot] = self._next_place
            actor.fixed[self._next_place], actor.group_of[self._next_place] = policy, 0
            self._next_place += 1
        self._places.move_to_end(snapshot)
        return self._places[snapshot]

    def _let_go(self) -> None:
        """Forget snapshots that have not played for longest."""
        playing = set(self._table.acting.tolist())
        for snapshot, place in list(self._places.items())[: max(0, len(self._places) - MOST_KEPT)]:
            if place not in playing:
                del self._places[snapshot], self._actor.fixed[place], self._actor.group_of[place]
