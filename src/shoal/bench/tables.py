"""Results as Markdown tables: what `make bench` prints and what docs/performance.md shows are the same lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.bench.measure import Spread

__all__ = ["LIMIT", "UNMEASURED", "bench_tables", "layouts", "markdown", "means_tables", "origins", "peer_tables", "short",
           "spread", "startup_tables"]

REFERENCE = "reference loop"
LIMIT = "composed limit"
UNMEASURED = "The composed limit of these env steps/s was not measured in this run; `make bench` measures it beside each run."

UNKNOWN = " (whether with uncommitted changes was not written down)"


def short(value: float | None) -> str:
    """Three digits that a person can compare: 512 k, 1.21 k, 348."""
    if value is None or not math.isfinite(value):
        return "-"
    for size, unit in ((1e6, " M"), (1e3, " k"), (1.0, "")):
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.0f}{unit}" if scaled >= 100 else f"{scaled:.3g}{unit}"
    return f"{value:.2g}"


def spread(values: Sequence[float | None]) -> str:
    """Median (lowest - highest)."""
    found = Spread.of([math.nan if value is None else value for value in values])
    return short(found.median) + (f" ({short(found.low)} - {short(found.high)})" if found.count > 1 else "")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, so that it reads well without a renderer too. A bar in a cell would end it."""
    head, *rows = [[" ".join(cell.split("\n")).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(head), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])


def where(results: Mapping[str, Any]) -> str:
    machine, versions = results["machine"], results["versions"]
    changed = " with uncommitted changes" if results["uncommitted_changes"] else ""
    return (f"{results['date']}, commit {results['commit'][:10]}{changed}, {machine['cores']} cores of {machine['cpu']} "
            f"(load {machine['load'][0]} at the start), torch {versions['torch']}.")


def origins(results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Where rows come from: one line, or one for each run that some of them are from."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(_origin(row) if "commit" in row else where(results), []).append(row["name"])
    if len(groups) < 2:
        return next(iter(groups), where(results))
    return "\n".join(f"- {', '.join(names)}: {line}" for line, names in groups.items())


def _origin(row: Mapping[str, Any]) -> str:
    changed = {True: " with uncommitted changes", False: ""}.get(row.get("uncommitted_changes"), UNKNOWN)
    where = f", {row['machine']} (load {row['load']:g})" if "machine" in row else ""
    return f"{row['date']}, commit {row['commit'][:10]}{changed}{where}."


def speeds(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    return [run["env_steps_per_second"] for run in runs if run["env_steps_per_second"] is not None]


def middle(values: Sequence[float | None]) -> float:
    return Spread.of([math.nan if value is None else value for value in values]).median


def failures(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """One line for each runner that failed, however often."""
    lines = []
    for name, outcomes in runs.items():
        errors = [outcome["error"] for outcome in outcomes if outcome["error"]]
        if errors:
            lines.append(f"- {name}: {len(errors)} of {len(outcomes)} runs failed: {errors[-1]}")
    return lines


# ---------------------------------------------------------------------------------------------- make bench
def bench_tables(results: Mapping[str, Any]) -> str:
    """The efficiency table, then where the time went."""
    cases = results["cases"]
    head = ("case", "env steps/s", "limit", "e", "i", "l", "r", "efficiency", "goal", REFERENCE, "shoal / loop")
    first = markdown(head, [_efficiency_row(case) for case in cases])
    second = markdown(("case", "learner idle", "policy lag mean / p95 / max", "start-up s", "time by phase, share of wall time"),
                      [_time_row(case) for case in cases])
    broken = [line for case in cases for line in failures({case["name"]: case["runs"], REFERENCE: case["reference"]})]
    verdicts = [f"- {case['name']}: {_last(case, 'verdict')}" for case in cases if _last(case, "verdict")]
    verdicts += [f"- {case['name']}: `--actors auto` chose {words}" for case in cases if (words := layouts(case["runs"]))]
    return "\n\n".join(part for part in (origins(results, cases), first, second, "\n".join(verdicts), "\n".join(broken)) if part)


def efficiencies(case: Mapping[str, Any]) -> list[float]:
    """One per round: a run divided by the limit measured in the same round."""
    return [run["env_steps_per_second"] / limit["env_steps_per_second"]
            for run, limit in zip(case["runs"], case["limits"], strict=False)
            if run["env_steps_per_second"] is not None and limit["env_steps_per_second"]]


def _efficiency_row(case: Mapping[str, Any]) -> list[str]:
    limits = case["limits"]
    parts = [spread([limit[part]["frames_per_second"] for limit in limits]) if limits else "-" for part in "eil"]
    efficiency = Spread.of(efficiencies(case))
    goal = case["efficiency_goal"]
    ratio = middle(speeds(case["runs"])) / middle(speeds(case["reference"]))
    return [case["name"], spread(speeds(case["runs"])), spread([limit["env_steps_per_second"] for limit in limits]), *parts,
            str(limits[0]["passes"]) if limits else "-",
            f"{efficiency.median:.2f} ({efficiency.low:.2f} - {efficiency.high:.2f})" if efficiency.count else "-",
            "-" if goal is None else f"{goal:g}", spread(speeds(case["reference"])),
            f"{ratio:.2f}" if math.isfinite(ratio) else "-"]


def layouts(runs: Sequence[Mapping[str, Any]]) -> str:
    """What `--actors auto` chose in each run, in words; empty where nobody asked it."""
    chosen = [(run["details"].get("layout") or {}).get("chosen") for run in runs if not run["error"]]
    counts = {words: chosen.count(words) for words in chosen if words}
    return "; ".join(f"{words} ({count} of {len(chosen)} runs)" for words, count in counts.items())


def _last(case: Mapping[str, Any], name: str) -> Any:
    found = [run["details"].get(name) for run in case["runs"] if not run["error"]]
    return found[-1] if found else None


def _time_row(case: Mapping[str, Any]) -> list[str]:
    good = [run["details"] for run in case["runs"] if not run["error"]]
    idle = Spread.of([details["learner_idle"] for details in good if details["learner_idle"] is not None])
    lag, phases = _last(case, "policy_lag") or {}, _last(case, "phases") or {}
    lags = " / ".join("-" if lag.get(key) is None else f"{lag[key]:.2g}" for key in ("mean", "p95", "max"))
    words = "; ".join(f"{role}: " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
                      for role, shares in phases.items())
    start = middle([details["startup_seconds"] for details in good])
    return [case["name"], f"{100 * idle.median:.0f} %" if idle.count else "-", lags,
            f"{start:.1f}" if math.isfinite(start) else "-", words or "-"]


# ---------------------------------------------------------------------------------------------- make bench-peers
def peer_tables(results: Mapping[str, Any]) -> str:
    """One table per scene, then seconds to the return; what could not be installed or run is said."""
    parts = ["\n".join(f"- {name}: {words}" for name, words in results["peers"].items())]
    for scene in results["scenes"]:
        parts += [f"### {scene['name']}", origins(results, [{**runs[-1], "name": who} for who, runs in scene["runs"].items()])]
        best = {name: middle(speeds(runs)) for name, runs in scene["runs"].items()}
        shoal = {name: speed for name, speed in best.items() if name.startswith("shoal")}
        head = ("who", "env steps/s", *(f"{name} is x times" for name in shoal))
        rows = [[name, spread(speeds(runs)), *(_times(speed, best[name]) for speed in shoal.values())]
                for name, runs in scene["runs"].items()]
        parts.append(markdown(head, rows))
        if not any(name.startswith(LIMIT) and speeds(runs) for name, runs in scene["runs"].items()):
            parts.append(UNMEASURED)
        found = [f"- {name}: `--actors auto` chose {words}" for name, runs in scene["runs"].items() if (words := layouts(runs))]
        parts.append("\n".join([*found, *failures(scene["runs"])]))
    if results.get("race"):
        parts.append(f"### Seconds of training to {results['race']['goal']:g} on {results['race']['env']}")
        races = results["race"]["runs"]
        parts.append(origins(results, [{**runs[-1], "name": who} for who, runs in races.items()]))
        ours = next((runs for name, runs in races.items() if name.startswith("shoal")), [])
        rows = [[name, spread([run["seconds"] for run in runs]), ", ".join(_race_words(run) for run in runs), _shares(ours, runs)]
                for name, runs in races.items()]
        parts.append(markdown(("who", "seconds", "each seed: seconds, mean over 100 episodes", "shoal's share of it"), rows))
    return "\n\n".join(part for part in parts if part)


def _times(speed: float, other: float) -> str:
    ratio = speed / other if other else math.nan
    return f"{ratio:.2f}" if math.isfinite(ratio) else "-"


def _shares(ours: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> str:
    """shoal's seconds divided by these, seed by seed."""
    pairs = [(our["seconds"], run["seconds"]) for our, run in zip(ours, runs, strict=False)]
    return ", ".join(f"{our / seconds:.2f}" if our is not None and seconds else "-" for our, seconds in pairs) or "-"


def _race_words(run: Mapping[str, Any]) -> str:
    if run["error"]:
        return f"failed ({run['error']})"
    return f"{short(run['seconds'])} s, {run['eval_return']:.0f}" if run["seconds"] is not None else "not reached"


# ---------------------------------------------------------------------------------------------- start-up and means
def startup_tables(results: Mapping[str, Any]) -> str:
    """First step with few and with many actors, their memory, and where the time goes."""
    good = [run for run in results["runs"] if not run["error"]]
    few, many = ([run for run in good if run["actors"] == actors] for actors in (2, 16))
    first, second = (middle([run["seconds"] for run in runs]) for runs in (few, many))
    most = Spread.of([max(run["actor_mb"]) for run in many if run["actor_mb"]])
    goals = results["goals"]
    rows = [["first environment step, 2 actors (s)", _each(few), f"< {goals['seconds']:g}", _met(first < goals["seconds"])],
            ["first environment step, 16 actors (s)", _each(many), "-", "-"],
            ["16 actors / 2 actors, medians", f"{second / first:.2f}" if first else "-", f"<= {goals['ratio']:g}",
             _met(second <= goals["ratio"] * first)],
            ["largest of 16 actors, MB (PSS)", f"{most.median:.0f} ({most.low:.0f} - {most.high:.0f})" if most.count else "-",
             f"< {goals['actor_mb']:g}", _met(most.high < goals["actor_mb"])]]
    parts = [[name, spread(values)] for name, values in results["parts"].items()]
    broken = "\n".join(f"- {run['actors']} actors: failed: {run['error']}" for run in results["runs"] if run["error"])
    loads = "Load average during the runs: " + ", ".join(f"{run['load']:g}" for run in good) + "."
    return "\n\n".join(part for part in (where(results), markdown(("what", "median (all runs)", "goal", "met"), rows), loads,
                                         markdown(("alone, in a fresh interpreter", "s"), parts), broken) if part)


def _each(runs: Sequence[Mapping[str, Any]]) -> str:
    values = [run["seconds"] for run in runs]
    return f"{middle(values):.2f} (" + ", ".join(f"{value:.2f}" for value in values) + ")" if values else "-"


def _met(yes: bool) -> str:
    return "yes" if yes else "no"


def means_tables(results: Mapping[str, Any]) -> str:
    """Each means with its ratio; below 1 it costs more than it brings here."""
    rows = []
    for row in results["means"]:
        ratios = Spread.of([on / off for off, on in zip(row["off"], row["on"], strict=True) if off and on])
        shown = f"{ratios.median:.2f} ({ratios.low:.2f} - {ratios.high:.2f})" if ratios.count else "-"
        rows.append([row["name"], row["without"], row["with"] + (f": {row['note']}" if row["note"] else ""), row["unit"],
                     spread(row["off"]), spread(row["on"]), shown])
    head = ("means", "without", "with", "unit", "without it", "with it", "ratio")
    unmeasured = UNMEASURED if any(row["unit"] == "env steps/s" for row in results["means"]) else ""
    return "\n\n".join(part for part in (origins(results, results["means"]), markdown(head, rows), unmeasured) if part)
