"""The pure parts of a league: sheets of PFSP, payoffs and qualities, and the rules of matchmaking."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from shoal.errors import ConfigError
from shoal.league.matchmaking import League, LeagueOptions, without_monotone_suffix
from shoal.league.opponents import OpponentQualities, pfsp
from shoal.league.payoff import PayoffTable
from shoal.league.pool_nash import nash_weights
from shoal.roles.coordinator import MOST_SNAPSHOTS, snapshot_number


@pytest.mark.parametrize(("weighting", "power", "want"), [
    ("hard", 2, [0.00641, 0.16026, 0.51923, 0.31410]),
    ("hard", 1, [0.04545, 0.22727, 0.40909, 0.31818]),
    ("linear", 2, [0.04545, 0.22727, 0.40909, 0.31818]),
    ("variance", 2, [0.14063, 0.39063, 0.14063, 0.32813]),
    ("linear_capped", 2, [0.0625, 0.3125, 0.3125, 0.3125]),
])
def test_pfsp(weighting, power, want):
    np.testing.assert_allclose(pfsp([0.9, 0.5, 0.1, 0.3], weighting, power), want, atol=5e-6)
    np.testing.assert_allclose(pfsp([1.0, 1.0], weighting), [0.5, 0.5])  # nobody is hard: uniform


def test_pfsp_mistakes():
    with pytest.raises(ValueError, match="no opponents"):
        pfsp([], "hard")
    with pytest.raises(ConfigError, match="use hard, variance"):
        pfsp([0.5], "soft")


def test_payoff_sheet():
    table = PayoffTable(0.99)
    for result in ("win", "win", "loss", "draw"):
        table.report("a", "b", result)
    assert abs(table.games("a", "b") - 3.940399) < 1e-9
    assert abs(table.rate("a", "b") * table.games("a", "b") - 2.450399) < 1e-9
    assert abs(table.rate("a", "b") - 0.621866) < 1e-6
    assert table.rate("a", "b") + table.rate("b", "a") == 1 and table.games("b", "a") == table.games("a", "b")
    assert table.rate("a", "stranger") == 0.5 and table.reports == 4
    table.report("a", "a", "win")
    assert table.rate("a", "a") == 0.5 and table.reports == 4
    again = PayoffTable.from_state(json.loads(json.dumps(table.state())))
    assert again.rate("a", "b") == table.rate("a", "b") and again.reports == 4
    with pytest.raises(ValueError):
        table.report("a", "b", "victory")


def test_payoffs_add_up():
    rng, table = np.random.default_rng(0), PayoffTable(0.97)
    for _ in range(500):
        home, away = rng.choice(list("abcd"), 2, replace=False)
        table.report(home, away, str(rng.choice(["win", "draw", "loss"])))
    for home in "abcd":
        for away in "abcd":
            assert abs(table.rate(home, away) + table.rate(away, home) - 1) < 1e-12


def test_qualities_sheet():
    four = OpponentQualities(0.01, dict.fromkeys("abcd", 0))
    four.won("a", 0.25)
    assert abs(four.qualities["a"] + 0.01) < 1e-12
    other = OpponentQualities(0.01, dict(zip("abcd", range(4), strict=True)))
    chances = other.probabilities("abcd")
    np.testing.assert_allclose(chances, [0.032059, 0.087144, 0.236883, 0.643914], atol=5e-7)
    other.won("a", chances[0])
    assert abs(other.qualities["a"] + 0.077982) < 1e-6
    other.won("d", chances[3])
    assert abs(other.qualities["d"] - 2.996117) < 1e-6
    other.add("e")
    other.add("a")
    assert other.qualities["e"] == other.qualities["d"] and other.qualities["a"] < 0
    first = OpponentQualities()
    first.add("a")
    first.remove("stranger")
    assert first.qualities == {"a": 0}


@pytest.mark.parametrize(("rates", "kept"), [
    ([], 0), ([0.5], 0), ([0.9, 0.8, 0.7], 0), ([0.5, 0.6], 2), ([0.2, 0.6, 0.5, 0.5], 2), ([0.3, 0.2, 0.9], 3),
    ([0.5, 0.5, 0.5], 0)])
def test_monotone_suffix(rates, kept):
    assert without_monotone_suffix(rates) == kept


class Shelf:
    """A vault in memory that keeps the order of what happens."""

    def __init__(self):
        self.events, self.kept = [], {}

    def put(self, name, weights, about):
        self.events.append(("put", name))
        self.kept[name] = dict(about)
        return name

    def names(self):
        return sorted(self.kept)

    def about(self, name):
        return self.kept[name]


def league(**options):
    made, shelf = League(LeagueOptions(**{"least_steps": 10, "most_steps": 20, **options})), Shelf()
    made.save(next(iter(made.players)), {}, shelf, np.random.default_rng(0))
    return made, shelf


def results(made, home, away, wins, games=200):
    for i in range(games):
        made.payoff.report(home, away, "win" if i % 100 < wins else "loss")


def drawn(made, name, count=3000, seed=0):
    rng = np.random.default_rng(seed)
    found = Counter(made.match(name, rng).away for _ in range(count))
    return {away: number / count for away, number in found.items()}


def test_main_agents_matches():
    made, shelf = league(main=2, decay=1.0)
    rng = np.random.default_rng(0)
    made.save("main_0", {}, shelf, rng)
    made.save("main_1", {}, shelf, rng)
    assert list(made.parent) == ["main_0-0000", "main_0-0001", "main_1-0000"]
    got = drawn(made, "main_0")  # all rates are 0.5: nothing to verify, so 50 % snapshots and 50 % main agents, itself included
    assert abs(sum(share for away, share in got.items() if "-" in away) - 0.5) < 0.04
    assert abs(got["main_0"] - 0.25) < 0.04 and abs(got["main_1"] - 0.25) < 0.04
    match = next(m for m in (made.match("main_0", rng) for _ in range(50)) if m.away == "main_0")
    assert match.mirror
    results(made, "main_0", "main_1", 20)  # too strong: its snapshots instead
    got = drawn(made, "main_0")
    assert "main_1" not in got and abs(got["main_1-0000"] - (0.5 / 3 + 0.25)) < 0.04
    results(made, "main_0", "main_0-0000", 90)
    results(made, "main_0", "main_0-0001", 50)
    hard = pfsp([0.9, 0.5, 0.5], "hard")
    got = drawn(made, "main_0")
    assert abs(got["main_0-0000"] - 0.5 * hard[0]) < 0.02


def test_verification():
    made, shelf = league(decay=1.0)
    rng = np.random.default_rng(0)
    assert made.to_verify("main", "main") == []
    for _ in range(3):
        made.save("main", {}, shelf, rng)
    names = [f"main-{i:04d}" for i in range(4)]
    for name, wins in zip(names, (40, 80, 60, 60), strict=True):
        results(made, "main", name, wins)
    assert made.to_verify("main", "main") == names[:2]  # 0.4 rises to 0.8; 0.6, 0.6 is the monotone suffix
    results(made, "main", names[0], 100, games=2000)
    assert made.to_verify("main", "main") == []
    made.save("main_exploiter", {}, shelf, rng)
    assert made.to_verify("main", "main") == []  # unknown: 0.5
    made.save("league_exploiter_0", {}, shelf, rng)
    results(made, "main", "league_exploiter_0-0000", 0)
    assert made.to_verify("main", "main") == []  # a league exploiter is not a main exploiter
    results(made, "main", "main_exploiter-0000", 20)
    assert made.to_verify("main", "main") == ["main_exploiter-0000"]


def by_quality(qualities=(0, 1, 2, 3)):
    """A league that draws by qualities alone, with this many snapshots of its main agent."""
    made, shelf = league(weighting="quality", snapshot_share=1.0, verification_share=0.0, main=2)
    for _ in qualities[1:]:
        made.save("main_0", {}, shelf, np.random.default_rng(0))
    for name, quality in zip(made.parent, qualities, strict=True):
        made.qualities["main_0"].qualities[name] = quality
    return made, shelf, list(made.parent)


def played(made, away, result, name="main_0"):
    """Draw matches until one is against this snapshot, and report how it ended."""
    rng = np.random.default_rng(0)
    match = next(match for match in (made.match(name, rng) for _ in range(10_000)) if match.away == away)
    assert made.report(match.number, result)
    return match


def test_quality_weighting():
    """OpenAI Five's sheet: q falls by rate / (N p) after a win, and by nothing else."""
    made, shelf, names = by_quality()
    got = drawn(made, "main_0", 20_000)
    np.testing.assert_allclose([got[name] for name in names], [0.032059, 0.087144, 0.236883, 0.643914], atol=0.01)
    assert abs(played(made, names[0], "loss").chance - 0.032059) < 1e-6
    played(made, names[1], "draw")
    played(made, names[1], "win", "main_1")  # another player's qualities
    assert list(made.qualities["main_0"].qualities.values()) == [0, 1, 2, 3]
    assert abs(made.qualities["main_1"].qualities[names[1]] + 0.01) < 1e-12
    played(made, names[0], "win")
    assert abs(made.qualities["main_0"].qualities[names[0]] + 0.077982) < 1e-6
    again, _, _ = by_quality()
    played(again, names[3], "win")
    assert abs(again.qualities["main_0"].qualities[names[3]] - 2.996117) < 1e-6
    again.save("main_1", {}, shelf, np.random.default_rng(0))
    assert again.qualities["main_0"].qualities["main_1-0000"] == again.qualities["main_0"].qualities[names[3]]  # the highest
    assert again.retire(names[3]) and names[3] not in again.qualities["main_0"].qualities
    assert set(drawn(again, "main_0")) == {*names[:3], "main_1-0000"}


def test_results_of_many_matches_under_way():
    """With the chance at the draw, a burst of wins over a snapshot cannot drive its quality away faster and faster."""
    made, _, names = by_quality((0, 0))
    rng = np.random.default_rng(0)
    matches = [match for match in (made.match("main_0", rng) for _ in range(1000)) if match.away == names[0]]
    for match in matches:
        made.report(match.number, "win")
    assert made.qualities["main_0"].qualities[names[0]] == pytest.approx(-0.01 * len(matches))


def test_wins_of_other_matches_leave_qualities():
    """A match that was not drawn by qualities, such as one of verification, has no probability to weigh a win by."""
    made, shelf = league(weighting="quality", snapshot_share=0.0, verification_share=1.0)
    made.save("main_exploiter", {}, shelf, np.random.default_rng(0))
    results(made, "main", "main_exploiter-0000", 10)
    assert played(made, "main_exploiter-0000", "win", "main").chance == 0
    assert made.qualities["main"].qualities == {"main-0000": 0, "main_exploiter-0000": 0}


def test_qualities_after_a_restart():
    """Of a checkpoint: what was learned, without snapshots that are gone, with those that came later, or that it never knew."""
    made, shelf, names = by_quality()
    played(made, names[0], "win")
    saved = json.loads(json.dumps(made.state()))
    made.save("main_0", {}, shelf, np.random.default_rng(0))
    again = League(made.options)
    again.load(saved)
    assert again.qualities["main_0"].qualities == {name: made.qualities["main_0"].qualities[name] for name in names}
    again.adopt(shelf)
    assert again.qualities["main_0"].qualities == made.qualities["main_0"].qualities
    assert drawn(again, "main_0") == drawn(made, "main_0")
    saved["qualities"]["main_0"]["main_0-0999"] = 50.0
    again.load(saved)
    assert list(again.qualities["main_0"].qualities) == names
    del saved["qualities"]  # as earlier versions had it
    again.load(saved)
    assert again.qualities["main_0"].qualities == dict.fromkeys(names, 0)
    plain = League(LeagueOptions(main=2))
    plain.load(made.state())
    assert plain.qualities == {} and plain.state()["qualities"] == {}


def test_exploiters_matches():
    made, shelf = league(decay=1.0)
    made.save("main_exploiter", {}, shelf, np.random.default_rng(0))
    assert drawn(made, "main_exploiter") == {"main": 1.0}
    results(made, "main_exploiter", "main", 5)
    assert drawn(made, "main_exploiter") == {"main-0000": 1.0}  # its own snapshots are not those of a main agent
    got = drawn(made, "league_exploiter_1")
    assert set(got) == {"main-0000", "main_exploiter-0000"} and abs(got["main-0000"] - 0.5) < 0.04
    results(made, "league_exploiter_1", "main-0000", 90)
    want = pfsp([0.9, 0.5], "linear_capped")
    assert abs(drawn(made, "league_exploiter_1")["main-0000"] - want[0]) < 0.03
    with pytest.raises(ValueError, match="begins with a snapshot"):
        League(LeagueOptions()).match("league_exploiter_0", np.random.default_rng(0))


def test_due():
    made, shelf = league(decay=1.0)
    for name in ("main", "main_exploiter", "league_exploiter_0"):
        player = made.players[name]
        player.steps = player.saved_at + 9
        assert not made.due(name)
        player.steps += 1
        assert not made.due(name)  # 0.5 is not 0.7
        player.steps += 9
        assert not made.due(name)
        player.steps += 1
        assert made.due(name)  # most_steps
        player.steps -= 10
    results(made, "main", "main-0000", 80)
    results(made, "league_exploiter_0", "main-0000", 80)
    results(made, "main_exploiter", "main-0000", 100)
    assert made.due("main") and made.due("league_exploiter_0") and not made.due("main_exploiter")
    results(made, "main_exploiter", "main", 80)
    assert made.due("main_exploiter")
    made.save("main", {}, shelf, np.random.default_rng(0))
    assert not made.due("main") and not made.due("league_exploiter_0")


def test_snapshot_precedes_reset():
    made, shelf = league()
    rng = np.random.default_rng(0)

    def saved(name):
        shelf.events.clear()
        made.save(name, {}, shelf, rng, reset=lambda: shelf.events.append(("reset", name)))
        assert shelf.events[0][0] == "put" and [kind for kind, _ in shelf.events].count("put") == 1
        return len(shelf.events) == 2

    assert not any(saved("main") for _ in range(20))
    assert all(saved("main_exploiter") for _ in range(20))
    resets = sum(saved("league_exploiter_0") for _ in range(400))
    assert 70 < resets < 130


def test_reports_count_once():
    made, _ = league(decay=1.0)
    rng = np.random.default_rng(0)
    match = made.match("main_exploiter", rng)
    assert made.report(match.number, "win") and not made.report(match.number, "win") and not made.report(999, "loss")
    assert made.payoff.reports == 1 and made.payoff.rate("main_exploiter", "main") == 1


def test_state_and_adopt():
    """What a coordinator knows after it died: its checkpoint, and every snapshot of the vault."""
    made, shelf = league()
    rng = np.random.default_rng(0)
    match = made.match("main", rng)
    results(made, "main", "main-0000", 60)
    saved = json.loads(json.dumps(made.state()))
    made.players["main"].steps = 33
    made.save("main", {}, shelf, rng)
    again = League(made.options)
    again.load(saved)
    assert again.payoff.rate("main", "main-0000") == made.payoff.rate("main", "main-0000")
    assert not again.report(match.number, "win")
    assert again.match("main", rng).number > match.number
    assert again.adopt(shelf) == ["main-0001"] and again.adopt(shelf) == []
    assert again.players["main"].snapshots == made.players["main"].snapshots and again.players["main"].saved_at == 33
    assert list(again.parent) == list(made.parent)


def test_a_successors_matches_have_other_numbers():
    """A result of a match that a coordinator gave after its last checkpoint is not entered for a match of its successor."""
    made, _ = league()
    rng = np.random.default_rng(0)
    saved = made.state()
    before = {made.match("main", rng).number for _ in range(20)}
    again = League(made.options, 1 << 40)
    again.load(saved)
    after = {again.match("main_exploiter", rng).number for _ in range(20)}
    assert len(after) == 20 and not before & after and not any(again.report(number, "win") for number in before)
    assert again.payoff.reports == 0 and all(again.report(number, "win") for number in after)


@pytest.mark.parametrize("name", ["main-0000", "main-9999", "main-10000", "main_exploiter-0000", "main_exploiter-123456"])
def test_snapshots_on_the_wire(name):
    """A league of a night has more than 10,000 snapshots of a player."""
    players = ("main", "main_exploiter")
    player, number = divmod(snapshot_number(name, players), MOST_SNAPSHOTS)
    assert f"{players[player]}-{number:04d}" == name


def test_options():
    with pytest.raises(ConfigError, match="more than 1 together"):
        LeagueOptions(snapshot_share=0.9, verification_share=0.2).validate()
    with pytest.raises(ConfigError, match=r"--league\.least-steps 9"):
        LeagueOptions(least_steps=9, most_steps=8).validate()


def test_nash_of_a_pool():
    rock = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]], float)
    assert np.allclose(nash_weights(rock), 1 / 3, atol=1e-3)
    biased = np.array([[0, -1, 10], [1, 0, -1], [-10, 1, 0]], float)  # scissors lose ten times to rock
    assert np.allclose(nash_weights(biased), [1 / 12, 10 / 12, 1 / 12], atol=5e-3)
    beaten = np.array([[0, 1], [-1, 0]], float)
    assert np.allclose(nash_weights(beaten), [1, 0], atol=1e-3)
