"""Population-based training without processes: Welch's numbers, who copies whom, the paper's toy (specs/policy.md 12d, 12e)."""

import numpy as np
import pytest

from shoal.coordination.population.exploit import Fitness, to_copy, welch
from shoal.coordination.population.halving import rungs, to_promote
from shoal.coordination.population.priors import choice, explored, loguniform, parse_prior, uniform
from shoal.errors import ConfigError


def of(returns):
    return Fitness(float(np.mean(returns)), float(np.std(returns)), len(returns))


def test_welch():
    one, other = of([10, 12, 11, 13, 9, 12, 10, 11, 12, 10]), of([8, 9, 11, 10, 9, 8, 10, 9, 9, 10])
    t, p = welch(one, other)
    assert t == pytest.approx(3.4306, abs=5e-5) and p == pytest.approx(0.003234, abs=5e-7)
    assert welch(other, one)[0] == pytest.approx(-t) and welch(one, one) == (0.0, pytest.approx(1.0))
    assert welch(Fitness(3), Fitness(2)) == (0.0, 1.0) and welch(Fitness(3, 0, 5), Fitness(2, 0, 5))[1] == 0
    assert to_copy(1, {0: one, 1: other}, "t_test", np.random.default_rng(0)) == 0
    assert to_copy(0, {0: one, 1: other}, "t_test", np.random.default_rng(0)) is None
    close = {0: of([10, 12, 11]), 1: of([9, 12, 11])}
    assert to_copy(1, close, "t_test", np.random.default_rng(0)) is None
    assert to_copy(1, close, "tournament", np.random.default_rng(0)) == 0


def test_truncation():
    """Truncation copies the top fifth to the bottom fifth."""
    known = {member: Fitness(float(member)) for member in range(10)}
    rng = np.random.default_rng(0)
    copies = {member: {to_copy(member, known, "truncation", rng) for _ in range(50)} for member in known}
    assert all(copies[member] == {8, 9} for member in (0, 1)) and all(copies[member] == {None} for member in range(2, 10))
    eight = {member: Fitness(float(member)) for member in range(8)}
    copies = {member: {to_copy(member, eight, "truncation", rng) for _ in range(50)} for member in eight}
    assert all(copies[member] == {6, 7} for member in (0, 1)) and all(copies[member] == {None} for member in range(2, 8))
    copying = [sum(to_copy(member, {one: Fitness(float(one)) for one in range(size)}, "truncation", rng) is not None
                   for member in range(size)) for size in range(1, 14)]
    assert copying == [0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]
    ties = {member: Fitness(1.0) for member in range(10)}
    assert {to_copy(member, ties, "truncation", rng) for member in ties} == {None}
    assert to_copy(0, {0: Fitness(0.0)}, "truncation", rng) is None
    assert to_copy(0, {0: Fitness(0.0), 1: Fitness(1.0)}, "truncation", rng) == 1


def test_bounds_of_drawn_values():
    """Values are drawn and perturbed within their bounds."""
    rng, priors = np.random.default_rng(0), {"lr": loguniform(1e-4, 1e-2), "size": uniform(8, 64), "kind": choice("a", "b", "c")}
    draws = [{name: prior.draw(rng) for name, prior in priors.items()} for _ in range(300)]
    rates = [one["lr"] for one in draws]
    assert 1e-4 <= min(rates) < 2e-4 and np.median(rates) == pytest.approx(1e-3, rel=0.4)
    assert {type(one["size"]) for one in draws} == {int} and {one["kind"] for one in draws} == {"a", "b", "c"}
    after = [explored({"lr": 1e-3, "size": 10, "kind": "b"}, priors, 0.0, rng) for _ in range(50)]
    assert {round(one["lr"], 6) for one in after} == {0.0012, 0.0008} and {one["size"] for one in after} == {12, 8}
    assert {one["kind"] for one in after} == {"a", "c"}
    assert loguniform(1e-4, 1e-2).perturb(1e-2, np.random.default_rng(1)) <= 1e-2
    assert uniform(0, 1).grid(3) == [0, 1] and uniform(0.0, 1.0).grid(3) == [0.0, 0.5, 1.0] and choice(1, 2).grid(5) == [1, 2]


def test_small_whole_numbers_are_perturbed():
    """Rounding does not bring them back; at a bound they stay within it."""
    rng = np.random.default_rng(0)
    moved = {value: {uniform(1, 8).perturb(value, rng) for _ in range(50)} for value in (1, 2, 3, 8)}
    assert moved == {1: {1, 2}, 2: {1, 3}, 3: {2, 4}, 8: {6, 8}}
    assert {type(value) for found in moved.values() for value in found} == {int}


def test_choice_of_tuples():
    """They are lists in a study's files, and are found again there."""
    sizes = choice((16,), (32, 32))
    assert sizes == parse_prior(str(sizes)) and all(sizes.holds(one) for one in ([16], [32, 32])) and not sizes.holds([8])
    assert sizes.perturb([16], np.random.default_rng(0)) in sizes.options


def test_ranges_on_the_command_line():
    assert parse_prior("loguniform(1e-4,1e-2)") == loguniform(1e-4, 1e-2) and parse_prior("choice(8, 16)") == choice(8, 16)
    for text, words in (("loguniform(1, 0.1)", "below the second"), ("loguniform(0, 1)", "above 0"),
                        ("normal(0, 1)", "not a range"), ("uniform(1)", "not a range"), ("choice(1)", "at least two"),
                        ("uniform(0, 1", "not a range"), (f"uniform(0, {10**400})", "finite"), ("uniform(0, 1e999)", "finite")):
        with pytest.raises(ConfigError, match=words):
            parse_prior(text)


def toy(seed, exploit, explore, steps=200, ready=5):
    """Maximise 1.2 - |theta|^2 by following the gradient of 1.2 - h0 theta0^2 - h1 theta1^2; the mean of the population."""
    rng = np.random.default_rng(seed)
    theta, h = np.full((2, 2), 0.9), np.eye(2)
    for step in range(1, steps + 1):
        theta -= 0.01 * 2 * h * theta
        if step % ready == 0:
            known = {m: Fitness(1.2 - float((theta[m] ** 2).sum())) for m in range(2)}
            for member in range(2):
                parent = to_copy(member, known, "tournament", rng) if exploit else None
                if parent is not None:
                    theta[member], h[member] = theta[parent], h[parent]
                if explore:
                    h[member] = np.clip(h[member] + rng.normal(0, 0.1, 2), 0, 1)
    return 1.2 - float((theta**2).sum(1).mean())


def test_the_papers_toy():
    """Medians of 20 seeds: copying and exploring together find what neither finds alone."""
    medians = {(a, b): float(np.median([toy(seed, a, b) for seed in range(20)])) for a in (True, False) for b in (True, False)}
    assert medians[True, True] >= 1.17 and medians[False, True] <= 1.13
    assert medians[False, False] == pytest.approx(0.3897, abs=5e-4) and medians[True, False] == medians[False, False]  # a tie


def test_halving():
    """One of three goes on, from the highest rung where one may, once; nobody goes beyond the last rung."""
    assert rungs(100, 900, 3) == [100, 300, 900] and rungs(100, 100, 3) == [100] and rungs(100, 950, 3) == [100, 300, 900, 950]
    first = {member: [float(member)] for member in range(6)}
    assert to_promote({0: [1.0], 1: [2.0]}, (), 3, 3) is None and to_promote(first, (), 3, 3) == 5
    assert to_promote(first, (5,), 3, 3) == 4 and to_promote(first, (4, 5), 3, 3) is None
    second = {**first, 5: [5.0, 1.0], 4: [4.0, 3.0], 3: [3.0, 2.0]}
    assert to_promote(second, (), 3, 3) == 4 and to_promote(second, (4,), 3, 3) is None
    assert to_promote(second, (), 3, 2) is None, "there is no third rung"
    assert to_promote({0: [1.0], 1: [1.0], 2: [1.0]}, (), 3, 2) == 0, "ties go to the first"
