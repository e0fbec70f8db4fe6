"""The Coordinator of a league: says who plays whom, enters results, saves players and lets them begin anew.

    actors ── matches (call) ──▶ Coordinator ──▶ vault/ in the run directory        snapshots: immutable, on disk
           ── snapshots (call) ─▶      ▲   └──▶ control: a player's learner starts, begins anew, stops
           ◀── line_up (broadcast) ──      └── P.weights (broadcast) of every player P

Players may begin late and end early (`LeagueOptions.periods`). The learner of one that is due is started, and when it has published
weights the player joins the line-up: from then on actors give it games. One that is over is saved, leaves the line-up, and its
learner is stopped. Who is due follows from the options and from how far the first main agent is, so a Coordinator's successor
needs to know nothing else: it asks for all learners again that should run, and for the end of the others.

A match has a number, and its result counts once. A Coordinator that dies loses the results since the last checkpoint, and no
snapshot: its successor takes over what lies in the vault, answers the requests that are open, and enters no result of a match that
it does not know. So the payoff table always has as many games as it has reports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from shoal.core import Asked, Control, Me, Publisher, Reader, Request, Server, Tree, Wait, any_of
from shoal.errors import CheckpointError, ConfigError, ProgramError
from shoal.league.matchmaking import League, LeaguePlan
from shoal.league.payoff import RESULTS
from shoal.league.vault import Vault
from shoal.learning import Algorithm
from shoal.roles import random_state
from shoal.slots import Field, Layout, leaves

__all__ = ["MOST_MATCHES", "MOST_SNAPSHOTS", "NOBODY", "Coordinator", "line_up_layout", "match_layouts", "snapshot_layout",
           "snapshot_number", "stored_tree"]

NOBODY = -1           # no result, nothing asked
MOST_SNAPSHOTS = 10**9  # of one player
MOST_MATCHES = 2**40  # in one life
MOST_REQUESTS = 32
AGAIN = 10  # tries to save a player within `least_steps`, on a full disk


def match_layouts(games: int) -> tuple[Layout, Layout]:
    """Request and reply of an actor with this many games: of each the result of its match, and who is to play next."""
    request = Layout({"match": Field((games,), "i8"), "result": Field((games,), "i8"), "home": Field((games,), "i8")})
    return request, Layout({"match": Field((games,), "i8"), "away": Field((games,), "i8"), "snapshot": Field((games,), "i8")})


def snapshot_layout() -> Layout:
    """Of a request for the weights of a snapshot."""
    return Layout({"snapshot": Field((1,), "i8")})


def line_up_layout(players: int) -> Layout:
    """Who plays now."""
    return Layout({"playing": Field((players,), "?")})


def snapshot_number(name: str, players: tuple[str, ...]) -> int:
    """The number that stands for a snapshot on the wire: the same in every life of the Coordinator."""
    player, _, number = name.rpartition("-")
    return players.index(player) * MOST_SNAPSHOTS + int(number)


def reset_order(snapshot: str) -> int:
    """The number of the order to begin anew after this snapshot. A learner follows each number once, so a Coordinator's successor
    has to go on from the last one: snapshots are never lost, and their numbers only grow."""
    return int(snapshot.rpartition("-")[2]) + 1


class Coordinator:
    """Says who plays whom; keeps payoffs and snapshots."""

    def __init__(self, me: Me, plan: LeaguePlan, algorithm: Algorithm, matches: Server, snapshots: Server,
                 weights: Mapping[str, Reader], line_up: Publisher, control: Control, started: tuple[str, ...],
                 learners: int = 1) -> None:
        """The learners of the players `started` run from the start; `learners` make the updates of one player together."""
        if me.folder is None:
            raise ConfigError("a league keeps snapshots on disk, and the program has no folder; set program.folder")
        self.me, self.plan, self.matches, self.snapshots, self.control = me, plan, matches, snapshots, control
        self.weights, self.layout, self.line_up, self.learners = weights, algorithm.published_layout(), line_up, learners
        self.started = started
        self.changes: dict[str, tuple[int, Asked]] = {}  # players whose learners are to be this many from now on, as was asked for
        self.counts: dict[str, int] = {}  # learners of each player, as far as that was asked for and carried out
        self.published = {name: self.layout.empty() for name in plan.players}
        self.versions = dict.fromkeys(plan.players, 0)
        self.league, self.vault = self._new_league(), Vault(Path(me.folder) / "vault")
        self.resets = dict.fromkeys(plan.players, 0)
        self.anew = dict.fromkeys(plan.players, 0)  # the order to begin anew that each player was given last
        self.owed: dict[str, int] = {}  # players that were saved and are to begin anew, and the number of that order
        self.postponed: dict[str, int] = {}  # players that could not be saved, and the env steps at which that is tried again
        self.rng = me.rng("matches")
        self.league.adopt(self.vault)
        self._owe_resets()
        self.settled = self.line_up_known = self.other_options = False
        self.told = Wait(lambda: self.other_options, "control", "other options")

    async def step(self) -> None:
        self.settled = True
        if not self.line_up_known:
            await self._begin()
        await any_of(self.matches.asked(), self.snapshots.asked(), *(asked.answered() for _, asked in self.changes.values()),
                     *(self.weights[name].newer_than(0) for name in self._awaited()), self.told)
        self.settled = self.other_options = False
        for request in self.matches.pending(MOST_REQUESTS):
            self._match(request)
        for request in self.snapshots.pending(MOST_REQUESTS):
            self._answer_snapshot(request)
        self._pull()
        for name in self.plan.players:
            if self.league.due(name):
                self._save(name)
        await self._change_line_up()
        for name, order in self.owed.items():
            self.resets[name] += 1
            self.anew[name] = order
            if name in self.league.playing:  # else it is told when it is started again
                await self.control.set(f"{name}.learner", resets=order)
                self.me.note(f"{name} begins anew")
        self.owed = {}

    def _match(self, request: Request) -> None:
        """Enter the results of an actor's games, and give it the next matches."""
        asked, players, reply = request.data, self.plan.players, request.answer
        ended, begins = np.flatnonzero(asked["result"] != NOBODY), np.flatnonzero(asked["home"] != NOBODY)
        entered = sum(self.league.report(int(asked["match"][game]), RESULTS[asked["result"][game]]) for game in ended)
        self.me.stats.add("league_reports", entered)
        reply["match"][:], reply["away"][:], reply["snapshot"][:] = 0, NOBODY, NOBODY
        for game in begins:
            match = self.league.match(players[asked["home"][game]], self.rng)
            reply["match"][game] = match.number
            if match.away in players:
                reply["away"][game] = players.index(match.away)
            else:
                reply["snapshot"][game] = snapshot_number(match.away, players)
        request.reply(reply)

    def _answer_snapshot(self, request: Request) -> None:
        """The weights of a snapshot. One that is damaged is played no more; this once its player takes its place, and that match
        does not count."""
        player, number = divmod(int(request.data["snapshot"][0]), MOST_SNAPSHOTS)
        name = f"{self.plan.players[player]}-{number:04d}"
        try:
            tree = stored_tree(self.vault, name, self.layout)
        except (CheckpointError, KeyError, ValueError) as error:
            if self.league.retire(name):
                self.me.note(f"the snapshot {name} is left out from now on: {error}")
            tree = self.published[self.plan.players[player]]
        request.reply(tree)

    # ------------------------------------------------------------------ who plays
    async def _begin(self) -> None:
        """Wait for the players that were started with the program."""
        self.league.playing = self.league.wanted() & set(self.started)
        for name in self.league.playing:
            await self.weights[name].newer_than(0)
        self._pull()
        for name in self.plan.players if not self.league.parent else ():
            if self.league.players[name].kind == "main" and name in self.league.playing:
                self._save(name)
        self._publish_line_up()

    def _awaited(self) -> list[str]:
        """Players that will join when their learners have published weights."""
        return [name for name, count in self.counts.items() if count and name not in self.league.playing]

    async def _change_line_up(self) -> None:
        """Start and stop learners, and tell the actors who plays. Never waits for a learner: others play meanwhile."""
        wanted, playing = self.league.wanted(), self.league.playing
        for name, (count, asked) in list(self.changes.items()):
            if asked.answered().ready():
                del self.changes[name]
                await self._changed(name, count, asked)
        for name in self.plan.players[1:]:
            count = self.learners if name in wanted else 0
            if not count and name in playing:
                playing.discard(name)
                if self.league.players[name].steps > self.league.players[name].saved_at:
                    self._save(name)
                self.me.note(f"{name} ends")
                self._publish_line_up()
            if name not in self.changes and self.counts.get(name) != count:
                self.changes[name] = count, self.control.begin_scale(f"{name}.learner", count)
            if count and name not in playing and self.counts.get(name) == count and self.weights[name].version:
                playing.add(name)
                self._pull()
                if self.league.players[name].kind == "main" and not self.league.players[name].snapshots:
                    self._save(name)
                self.me.note(f"{name} begins")
                self._publish_line_up()

    async def _changed(self, name: str, count: int, asked: Asked) -> None:
        """The learners of a player have been started or stopped."""
        try:
            await asked.result()
        except ProgramError as error:
            self.me.note(f"{name}: {error}")
        self.counts[name] = count
        if count and self.anew[name]:
            await self.control.set(f"{name}.learner", resets=self.anew[name])

    def capture_anew(self) -> None:
        """Options have changed, perhaps while nobody asks for matches: all actors may wait for a learner that is to be stopped."""
        self.other_options = True

    def _publish_line_up(self) -> None:
        self.line_up.publish({"playing": np.array([name in self.league.playing for name in self.plan.players])})
        self.line_up_known = True

    # ------------------------------------------------------------------ players
    def _pull(self) -> None:
        """How far the players are."""
        for name, reader in self.weights.items():
            if reader.version != self.versions[name]:
                self.versions[name] = reader.pull(self.published[name])
                player = self.league.players[name]
                player.steps = max(player.steps, int(self.published[name]["progress"][0]))

    def _save(self, name: str) -> None:
        """Put a snapshot of a player into the vault; it begins anew afterwards, where the league says so."""
        flat, steps, resets = flat_tree(self.published[name]), self.league.players[name].steps, list[str]()
        if steps < self.postponed.get(name, 0):
            return
        try:
            snapshot = self.league.save(name, flat, self.vault, self.rng, lambda: resets.append(name))
        except OSError as error:  # a full disk: without it training goes on, but a league cannot begin
            if not self.league.parent:
                raise
            self.postponed[name] = steps + max(1, self.plan.options.least_steps // AGAIN)
            self.me.note(f"{name} could not be saved: {error.strerror or error}; it is tried again")
            return
        if resets:
            self.owed[name] = reset_order(snapshot)
        self.me.stats.add("league_snapshots")
        self.me.note(f"{name} was saved as {snapshot}")

    def _owe_resets(self) -> None:
        """Let main exploiters begin anew whose predecessor in this role died between saving and telling them. One that was told
        ignores it."""
        for name, player in self.league.players.items():
            if player.kind == "main_exploiter" and player.snapshots:
                order = reset_order(player.snapshots[-1])
                if order > self.anew[name]:
                    self.owed[name] = order

    # ------------------------------------------------------------------ what a checkpoint holds
    def _new_league(self) -> League:
        return League(self.plan.options, self.me.incarnation * MOST_MATCHES)

    def state(self) -> dict[str, np.ndarray]:
        text = json.dumps({"league": self.league.state(), "resets": self.resets, "anew": self.anew, "players": self.plan.players,
                           "playing": sorted(self.league.playing)})
        return {"league": np.frombuffer(text.encode(), np.uint8), "rng": random_state.pack(self.rng)}

    def load(self, state: dict[str, np.ndarray]) -> None:
        found = json.loads(bytes(state["league"]))
        self.league = self._new_league()
        self.league.load(found["league"])
        self.league.adopt(self.vault)
        self.resets = {name: int(found["resets"][name]) for name in self.plan.players}
        self.anew = {name: int(found.get("anew", found["resets"])[name]) for name in self.plan.players}
        self.owed = {}
        self._owe_resets()
        random_state.unpack(self.rng, state["rng"])


def flat_tree(tree: Tree) -> dict[str, np.ndarray]:
    """Arrays by their paths, as a Vault keeps them."""
    return {"/".join(path): np.array(leaf) for path, leaf in leaves(tree)}


def stored_tree(vault: Vault, snapshot: str, layout: Layout) -> Tree:
    """What a player had published when it was saved as this snapshot."""
    found, tree = vault.weights(snapshot), layout.empty()
    for path, leaf in leaves(tree):
        leaf[...] = found["/".join(path)]
    return tree
