"""Made-up results for tests of what is made of results, and a suite of real ones."""

from __future__ import annotations

from pathlib import Path

from shoal.bench.results_folder import ResultsFolder

SESSION = {"suite": "t", "title": "A <title>", "date": "2026-01-01T00:00:00Z", "commit": "0123456789abcdef",
           "uncommitted_changes": False, "machine": {"cores": 2, "cpu": "A CPU", "load": [0.1, 0.1, 0.1]},
           "versions": {"torch": "2.13.0", "ale-py": "not installed"}}
SUITE = """
[defaults]
preset = "a2c"
env = "shoal/Catch-v0"
runtime = "inline"
seeds = [1]
max_seconds = 600.0
overrides = { "eval.enabled" = false, "net.hidden" = [8], "actors" = 1 }
[[case]]
name = "one"
"""
"""A suite with a case that really runs, for longer than any test."""


def row(group, seed, **values):
    return {"key": f"{group} {seed}", "group": group, "case": group, "seed": seed, "env": "E-v0", "error": None,
            "until_return": None, "asked_actors": None, "load": 0.5, **values}


def results_with(folder: Path, rows) -> ResultsFolder:
    book = ResultsFolder(folder)
    book.append("session", SESSION)
    for one in rows:
        book.append("row", one)
    return book


def learning(group, seed, steps, goal=475.0):
    reached = {"env_steps_to_threshold": steps, "seconds_to_threshold": None if steps is None else steps / 1000}
    return row(group, seed, until_return=goal, final_return=480.0 if steps else 100.0,
               curve=[[100, 1.0, 50.0], [900, 2.0, 300.0]], **reached)


def speeds(group, values):
    return [row(group, seed, env_steps_per_second=value, startup_seconds=2.0) for seed, value in enumerate(values)]
