"""Who plays whom in a league, and when a player is saved and begins anew (Vinyals et al. 2019, AlphaStar's supplement).

    player            plays                                                           is saved when           begins anew
    main agent        50 % PFSP hard over all snapshots; 15 % verification;           it beats all snapshots  never
                      otherwise, or with nothing to verify, itself and its like
    main exploiter    a main agent; while that is too strong, its snapshots           it beats all main       always
                      (PFSP variance)                                                 agents
    league exploiter  PFSP linear_capped over all snapshots                           it beats all snapshots  with `reset_share`

Nobody is saved before `least_steps`, and everybody after `most_steps`. A snapshot is always taken before a reset. Only `home`
learns from a match, both sides where a main agent plays itself.

`periods` say when players learn, by the env steps of the first main agent, which always does. One that is not playing has no match,
is nobody's opponent and is not saved; its snapshots are played as ever.

`weighting` says how a main agent draws those 50 % (opponents.py). With `quality`, only wins of these matches lower a quality: other
matches were not drawn with its probabilities.

Verification looks for what the main agent may have forgotten: snapshots of main exploiters that beat it, then old snapshots of a
main agent that it beats less often than the ones before them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from shoal.errors import CheckpointError, ConfigError
from shoal.league.opponents import OpponentQualities, Weighting, pfsp
from shoal.league.payoff import PayoffTable
from shoal.options import Options, number

__all__ = ["Kind", "League", "LeagueOptions", "LeaguePlan", "LeaguePlayer", "Match", "Snapshots", "without_monotone_suffix"]

Kind = Literal["main", "main_exploiter", "league_exploiter"]


@dataclass(frozen=True)
class LeagueOptions(Options):
    """Shares, thresholds and periods of a league."""

    section = "league"

    main: int = number(1, at_least=1, at_most=100)
    """Main agents."""
    main_exploiters: int = number(1, at_least=0, at_most=100)
    """Players that learn to beat the main agents as they are now."""
    league_exploiters: int = number(2, at_least=0, at_most=100)
    """Players that learn to beat every snapshot."""
    decay: float = number(0.99, above=0, at_most=1)
    """What older results in the payoff table are multiplied by at each new one."""
    snapshot_share: float = number(0.5, at_least=0, at_most=1)
    """Share of a main agent's matches against all snapshots."""
    verification_share: float = number(0.15, at_least=0, at_most=1)
    """Share of its matches that look for what it has forgotten."""
    weighting: Weighting = "hard"
    """How a main agent chooses among snapshots: by how hard they are for it, uniformly (fictitious play), or by qualities that fall
    when it wins (OpenAI Five)."""
    hard_power: float = number(2.0, above=0)
    """Power of the hard weighting."""
    quality_rate: float = number(0.01, above=0)
    """How fast the quality of a snapshot falls, with the weighting quality."""
    even_rate: float = number(0.3, at_least=0, at_most=1)
    """A main agent plays another one that it beats more often than this; otherwise that one's snapshots."""
    exploited_rate: float = number(0.3, at_least=0, at_most=1)
    """Verification: exploiters' snapshots count where one of them is beaten less often than this."""
    forgotten_rate: float = number(0.7, at_least=0, at_most=1)
    """Verification: old snapshots count where one of them is beaten less often than this."""
    exploiter_rate: float = number(0.1, at_least=0, at_most=1)
    """A main exploiter plays a main agent that it beats more often than this; otherwise its snapshots."""
    beaten_rate: float = number(0.7, at_least=0, at_most=1)
    """A player that beats everybody it must more often than this is saved."""
    least_steps: int = number(20_000, at_least=1)
    """Env steps of a player between two snapshots, at least."""
    most_steps: int = number(40_000, at_least=1)
    """Env steps of a player between two snapshots, at most."""
    reset_share: float = number(0.25, at_least=0, at_most=1)
    """Probability that a league exploiter starts over after a snapshot."""
    periods: tuple[str, ...] = field(default=(), metadata={"live": True})
    """When players learn that do not learn all the time: PLAYER=FROM:TO, in env steps of the first main agent; PLAYER=FROM: has no
    end, and PLAYER=0:0 never begins."""

    @property
    def names(self) -> dict[str, Kind]:
        """The players by name."""
        kinds: list[tuple[Kind, int]] = [("main", self.main), ("main_exploiter", self.main_exploiters),
                                         ("league_exploiter", self.league_exploiters)]
        return {name: kind for kind, count in kinds for name in _names(kind, count)}

    def period(self, name: str) -> tuple[float, float]:
        """From when to when a player learns, in env steps of the first main agent."""
        return dict(map(_period, self.periods)).get(name, (0, math.inf))

    def validate(self) -> None:
        super().validate()
        first, *others = self.names
        given = [_period(word)[0] for word in self.periods]
        for name in given:
            if name not in others or given.count(name) > 1:
                raise ConfigError(f"--league.periods names {name}" + (" twice; give it once" if given.count(name) > 1 else
                                  f", which plays all the time; {_those(others)}" if name == first else
                                  f", and this league has no such player; {_those(others)}"))
        if self.snapshot_share + self.verification_share > 1:
            raise ConfigError(f"--league.snapshot-share {self.snapshot_share:g} and --league.verification-share "
                              f"{self.verification_share:g} are more than 1 together; lower one of them")
        if self.least_steps > self.most_steps:
            raise ConfigError(f"--league.least-steps {self.least_steps} is more than --league.most-steps {self.most_steps}; "
                              "raise the second")


@dataclass(frozen=True)
class LeaguePlan:
    """Who takes part in a league."""

    options: LeagueOptions
    players: tuple[str, ...]
    """Those that learn; a player's place is its number."""

    @classmethod
    def of(cls, options: LeagueOptions) -> LeaguePlan:
        options.validate()
        return cls(options, tuple(options.names))

    def started(self) -> tuple[str, ...]:
        """Those whose learners are there from the start; others are started when they are due."""
        return tuple(name for name in self.players if self.options.period(name) == (0, math.inf))


@dataclass
class LeaguePlayer:
    """One that learns."""

    name: str
    kind: Kind
    steps: int = 0
    """Env steps that it has played."""
    saved_at: int = 0
    """Its `steps` when it was saved last."""
    snapshots: list[str] = field(default_factory=list)
    """Their names, the oldest first."""


class Match(NamedTuple):
    """One to be played."""

    number: int
    home: str
    away: str
    mirror: bool
    """Whether both sides are the same player, and both learn."""
    chance: float = 0.0
    """The probability with which a main agent drew this one of all snapshots; 0 where it was not drawn so."""


class Snapshots(Protocol):
    """Where snapshots are kept: a Vault."""

    def put(self, name: str, weights: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> str: ...
    def names(self) -> list[str]: ...
    def about(self, name: str) -> dict[str, Any]: ...


class League:
    """Players, payoffs and matches under way."""

    def __init__(self, options: LeagueOptions, matches: int = 0) -> None:
        """Matches are numbered from `matches` on: a Coordinator's successor needs numbers that its predecessor has not given since
        the last checkpoint, for results of those matches may still come."""
        options.validate()
        self.options, self.payoff = options, PayoffTable(options.decay)
        self.players = {name: LeaguePlayer(name, kind) for name, kind in options.names.items()}
        self.playing = set(self.players)
        """Those that have matches of their own now."""
        self.parent: dict[str, str] = {}
        """The player that each snapshot is of, the oldest snapshot first."""
        self.qualities = {name: OpponentQualities(options.quality_rate) for name, player in self.players.items()
                          if player.kind == "main" and options.weighting == "quality"}
        """Of all snapshots, for each main agent that draws by them."""
        self._open: dict[int, Match] = {}
        self._matches = matches
        self._looked: tuple[PayoffTable, int, int] | None = None
        self._sums: dict[tuple[str, Weighting, tuple[str, ...]], np.ndarray] = {}  # of chances
        self._suspects: dict[tuple[str, str], list[str]] = {}

    @property
    def _mains(self) -> list[str]:
        return [name for name in self.players if name in self.playing and self.players[name].kind == "main"]

    def wanted(self) -> set[str]:
        """Those that are to play now, by their periods."""
        done = next(iter(self.players.values())).steps
        return {name for name in self.players if (period := self.options.period(name))[0] <= done < period[1]}

    # ------------------------------------------------------------------ matches
    def match(self, name: str, rng: np.random.Generator) -> Match:
        """The next match of a player that learns."""
        player, chance = self.players[name], 0.0
        if player.kind == "main":
            coin = rng.random()
            if coin < self.options.snapshot_share:
                away, chance = self._draw_with_chance(player, list(self.parent), self.options.weighting, rng)
            else:
                away = self._for_main(player, coin, rng)
        elif player.kind == "main_exploiter":
            away = self._for_main_exploiter(player, rng)
        else:
            away = self._draw(player, list(self.parent), "linear_capped", rng)
        self._matches += 1
        match = self._open[self._matches] = Match(self._matches, name, away, away == name, chance)
        return match

    def report(self, number: int, result: str) -> bool:
        """Enter how a match ended for its home player: win, draw or loss. False for one that is not (or no longer) under way."""
        match = self._open.pop(number, None)
        if match is None:
            return False
        self.payoff.report(match.home, match.away, result)
        if match.chance and match.home in self.qualities and result == "win":
            self.qualities[match.home].won(match.away, match.chance)
        return True

    def _look(self) -> None:
        """Forget what was computed of rates that have changed since."""
        now = self.payoff, self.payoff.reports, len(self.parent)
        if now != self._looked:
            self._looked, self._sums, self._suspects = now, {}, {}

    def _for_main(self, player: LeaguePlayer, coin: float, rng: np.random.Generator) -> str:
        """Where a main agent does not play against all snapshots."""
        options, rival = self.options, self._any_main(rng)
        if coin < options.snapshot_share + options.verification_share:
            suspects = self.to_verify(player.name, rival)
            if suspects:
                return self._draw(player, suspects, "hard", rng)
        if self.payoff.rate(player.name, rival) > options.even_rate:
            return rival
        return self._draw(player, self.players[rival].snapshots or [rival], "variance", rng)

    def to_verify(self, name: str, rival: str) -> list[str]:
        """Snapshots that a main agent may have forgotten how to beat; none: []."""
        self._look()
        if (name, rival) not in self._suspects:
            self._suspects[name, rival] = self._forgotten(name, rival)
        return self._suspects[name, rival]

    def _forgotten(self, name: str, rival: str) -> list[str]:
        options = self.options
        exploiters = [snapshot for snapshot, of in self.parent.items() if self.players[of].kind == "main_exploiter"]
        if exploiters and self.payoff.rates(name, exploiters).min() < options.exploited_rate:
            return exploiters
        old = self.players[rival].snapshots
        old = old[: without_monotone_suffix(self.payoff.rates(name, old))]
        return old if old and self.payoff.rates(name, old).min() < options.forgotten_rate else []

    def _for_main_exploiter(self, player: LeaguePlayer, rng: np.random.Generator) -> str:
        rival = self._any_main(rng)
        if self.payoff.rate(player.name, rival) > self.options.exploiter_rate:
            return rival
        return self._draw(player, self.players[rival].snapshots or [rival], "variance", rng)

    def _draw(self, player: LeaguePlayer, opponents: Sequence[str], weighting: Weighting, rng: np.random.Generator) -> str:
        return self._draw_with_chance(player, opponents, weighting, rng)[0]

    def _draw_with_chance(self, player: LeaguePlayer, opponents: Sequence[str], weighting: Weighting,
                          rng: np.random.Generator) -> tuple[str, float]:
        """An opponent, and the probability with which it was drawn."""
        if not opponents:
            raise ValueError("a league begins with a snapshot of a main agent: call `save` first")
        self._look()
        known = player.name, weighting, tuple(opponents)
        sums = self._sums.get(known)
        if sums is None:
            if weighting == "quality":
                chances = self.qualities[player.name].probabilities(opponents)
            else:
                chances = pfsp(self.payoff.rates(player.name, opponents), weighting, self.options.hard_power)
            sums = self._sums[known] = np.cumsum(chances)
        at = min(int(sums.searchsorted(rng.random() * sums[-1], side="right")), len(opponents) - 1)
        return opponents[at], float(sums[at] - (sums[at - 1] if at else 0.0))

    def _any_main(self, rng: np.random.Generator) -> str:
        mains = self._mains
        return mains[int(rng.integers(len(mains)))] if len(mains) > 1 else mains[0]

    # ------------------------------------------------------------------ snapshots
    def due(self, name: str) -> bool:
        """Whether a player is to be saved now."""
        player, options = self.players[name], self.options
        passed = player.steps - player.saved_at
        if passed < options.least_steps or name not in self.playing:
            return False
        beaten = self._mains if player.kind == "main_exploiter" else list(self.parent)
        rates = self.payoff.rates(name, beaten)
        return bool(passed >= options.most_steps or (len(rates) and rates.min() > options.beaten_rate))

    def save(self, name: str, weights: Mapping[str, np.ndarray], vault: Snapshots, rng: np.random.Generator,
             reset: Callable[[], None] = lambda: None) -> str:
        """Put a snapshot of a player into the vault; then, where its kind begins anew, call `reset`. Returns its name."""
        player, taken = self.players[name], set(vault.names())
        names = (f"{name}-{number:04d}" for number in itertools.count(len(player.snapshots)))
        snapshot = next(one for one in names if one not in taken)  # a damaged one keeps its name
        vault.put(snapshot, weights, {"player": name, "kind": player.kind, "steps": player.steps,
                                      "parent": player.snapshots[-1] if player.snapshots else None})
        self._enter(snapshot, player, player.steps)
        share = {"main": 0.0, "main_exploiter": 1.0, "league_exploiter": self.options.reset_share}[player.kind]
        if rng.random() < share:
            reset()
        return snapshot

    def adopt(self, vault: Snapshots) -> list[str]:
        """Enter snapshots that lie in the vault and are not known here: those since the checkpoint that `load` was given."""
        entered = []
        for name in vault.names():
            with contextlib.suppress(CheckpointError, KeyError, TypeError, ValueError):  # one that is damaged is not played
                if name not in self.parent:
                    about = vault.about(name)
                    self._enter(name, self.players[about["player"]], int(about["steps"]))
                    entered.append(name)
        return entered

    def retire(self, snapshot: str) -> bool:
        """Play it no more; results of matches against it that are under way will not be entered. False if it is not played."""
        if snapshot not in self.parent:
            return False
        self.players[self.parent.pop(snapshot)].snapshots.remove(snapshot)
        for qualities in self.qualities.values():
            qualities.remove(snapshot)
        self._open = {number: match for number, match in self._open.items() if match.away != snapshot}
        return True

    def _enter(self, snapshot: str, player: LeaguePlayer, steps: int) -> None:
        player.snapshots.append(snapshot)
        player.saved_at = steps
        player.steps = max(player.steps, steps)
        self.parent[snapshot] = player.name
        for qualities in self.qualities.values():
            qualities.add(snapshot)

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, Any]:
        """As JSON. Matches under way are left out: their results will not be entered."""
        players = {name: [player.steps, player.saved_at, player.snapshots] for name, player in self.players.items()}
        qualities = {name: one.qualities for name, one in self.qualities.items()}
        return {"payoff": self.payoff.state(), "players": players, "parent": self.parent, "matches": self._matches,
                "qualities": qualities}

    def load(self, state: Mapping[str, Any]) -> None:
        self.payoff = PayoffTable.from_state(state["payoff"])
        for name, (steps, saved_at, snapshots) in state["players"].items():
            player = self.players[name]
            player.steps, player.saved_at, player.snapshots = int(steps), int(saved_at), [str(one) for one in snapshots]
        self.parent = {snapshot: self.players[player].name for snapshot, player in state["parent"].items()}
        self._matches, self._open = max(self._matches, int(state["matches"])), {}
        kept = state.get("qualities", {})  # earlier versions had none
        for name in self.qualities:
            known = {one: quality for one, quality in kept.get(name, {}).items() if one in self.parent}
            self.qualities[name] = OpponentQualities(self.options.quality_rate, known)
            for snapshot in self.parent:
                self.qualities[name].add(snapshot)


def without_monotone_suffix(rates: np.ndarray | Sequence[float]) -> int:
    """How many of a main agent's snapshots, the oldest first, remain when those at the end are cut for which the rate does not rise
    from one snapshot to the next newer one. A rate that rises means that an older snapshot is harder than a newer one."""
    for i in range(len(rates) - 1, 0, -1):
        if rates[i - 1] < rates[i]:
            return i + 1
    return 0


def _names(kind: str, count: int) -> list[str]:
    return [kind] if count == 1 else [f"{kind}_{i}" for i in range(count)]


def _period(word: str) -> tuple[str, tuple[float, float]]:
    """PLAYER=FROM:TO as (player, (from, to))."""
    found = re.fullmatch(r"(\w+)=(\d{1,18}):(\d{0,18})", word)
    if found is None:
        raise ConfigError(f"--league.periods {word} is not a period; write it like main_exploiter=100000:500000, or "
                          "main_exploiter=100000: without an end")
    name, begin, end = found.groups()
    if end and int(end) < int(begin):
        raise ConfigError(f"--league.periods {word} ends before it begins; exchange the numbers")
    return name, (int(begin), int(end) if end else math.inf)


def _those(players: list[str]) -> str:
    return f"others are {', '.join(players)}" if players else "it has no others"
