"""The Coordinator of a league: says who plays whom, enters results, saves players and lets them begin anew.

    actors ── matches (call) ──▶ Coordinator ──▶ vault/ in the run directory        snapshots: immutable, on disk
           ── snapshots (call) ─▶      ▲   └──▶ control: a player's learner begins anew
                                       └── P.weights (broadcast) of every player P

A match has a number, and its result counts once. A Coordinator that dies loses the results since the last checkpoint, and no
snapshot: its successor takes over what lies in the vault, answers the requests that are open, and enters no result of a match that
it does not know. So the payoff table always has as many games as it has reports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from shoal.core import Control, Me, Reader, Request, Server, Tree, any_of
from shoal.errors import CheckpointError, ConfigError
from shoal.league.matchmaking import League, LeaguePlan
from shoal.league.payoff import RESULTS
from shoal.league.vault import Vault
from shoal.learning import Algorithm
from shoal.roles import random_state
from shoal.slots import Field, Layout, leaves

__all__ = ["NOBODY", "Coordinator", "match_layouts", "snapshot_layout", "snapshot_number", "stored_tree"]

NOBODY = -1           # no result, nothing asked
MOST_SNAPSHOTS = 10_000  # of one player
MOST_REQUESTS = 32
AGAIN = 10  # tries to save a player within `least_steps`, on a full disk


def match_layouts(games: int) -> tuple[Layout, Layout]:
    """Request and reply of an actor with this many games: of each the result of its match, and who is to play next."""
    request = Layout({"match": Field((games,), "i8"), "result": Field((games,), "i8"), "home": Field((games,), "i8")})
    return request, Layout({"match": Field((games,), "i8"), "away": Field((games,), "i8"), "snapshot": Field((games,), "i8")})


def snapshot_layout() -> Layout:
    """Of a request for the weights of a snapshot."""
    return Layout({"snapshot": Field((1,), "i8")})


def snapshot_number(name: str, players: tuple[str, ...]) -> int:
    """The number that stands for a snapshot on the wire: the same in every life of the Coordinator."""
    player, _, number = name.rpartition("-")
    return players.index(player) * MOST_SNAPSHOTS + int(number)


class Coordinator:
    """Says who plays whom; keeps payoffs and snapshots."""

    def __init__(self, me: Me, plan: LeaguePlan, algorithm: Algorithm, matches: Server, snapshots: Server,
                 weights: Mapping[str, Reader], control: Control) -> None:
        if me.folder is None:
            raise ConfigError("a league keeps snapshots on disk, and the program has no folder; set program.folder")
        self.me, self.plan, self.matches, self.snapshots, self.control = me, plan, matches, snapshots, control
        self.weights, self.layout = weights, algorithm.published_layout()
        self.published = {name: self.layout.empty() for name in plan.players}
        self.versions = dict.fromkeys(plan.players, 0)
        self.league, self.vault = League(plan.options), Vault(Path(me.folder) / "vault")
        self.resets = dict.fromkeys(plan.players, 0)
        self.owed: list[str] = []  # players that were saved and are to begin anew
        self.postponed: dict[str, int] = {}  # players that could not be saved, and the env steps at which that is tried again
        self.rng = me.rng("matches")
        self.league.adopt(self.vault)
        self.settled = False

    async def step(self) -> None:
        self.settled = True
        for reader in self.weights.values():
            await reader.newer_than(0)
        if not self.league.parent:
            self._pull()
            for name in self.plan.players:
                if self.league.players[name].kind == "main":
                    self._save(name)
        await any_of(self.matches.asked(), self.snapshots.asked())
        self.settled = False
        for request in self.matches.pending(MOST_REQUESTS):
            self._match(request)
        for request in self.snapshots.pending(MOST_REQUESTS):
            self._answer_snapshot(request)
        self._pull()
        for name in self.plan.players:
            if self.league.due(name):
                self._save(name)
        for name in self.owed:
            self.resets[name] += 1
            await self.control.set(f"{name}.learner", resets=self.resets[name])
            self.me.note(f"{name} begins anew")
        self.owed = []

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
        flat, steps = flat_tree(self.published[name]), self.league.players[name].steps
        if steps < self.postponed.get(name, 0):
            return
        try:
            snapshot = self.league.save(name, flat, self.vault, self.rng, lambda: self.owed.append(name))
        except OSError as error:  # a full disk: without it training goes on, but a league cannot begin
            if not self.league.parent:
                raise
            self.postponed[name] = steps + max(1, self.plan.options.least_steps // AGAIN)
            self.me.note(f"{name} could not be saved: {error.strerror or error}; it is tried again")
            return
        self.me.stats.add("league_snapshots")
        self.me.note(f"{name} was saved as {snapshot}")

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray]:
        text = json.dumps({"league": self.league.state(), "resets": self.resets, "players": self.plan.players})
        return {"league": np.frombuffer(text.encode(), np.uint8), "rng": random_state.pack(self.rng)}

    def load(self, state: dict[str, np.ndarray]) -> None:
        found = json.loads(bytes(state["league"]))
        self.league = League(self.plan.options)
        self.league.load(found["league"])
        self.league.adopt(self.vault)
        self.resets = {name: int(found["resets"][name]) for name in self.plan.players}
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
