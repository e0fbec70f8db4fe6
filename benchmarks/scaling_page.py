"""Writes the judgement and the curves of the model into docs/scaling.md: `python -m benchmarks.scaling_page`.

The costs are those that `python -m evidence --only scaling` measured (docs/results/scaling-*.json); no number is typed by
hand.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS, ROOT, insert
from shoal.bench.text_tables import UNMEASURED
from shoal.planning.pipeline import simulate
from shoal.planning.terms import Cluster, Cost, Costs, Forecast
from shoal.telemetry.svg import COLOURS, Polyline, lines

__all__ = ["costs_from", "write"]

PAGE = ROOT / "docs" / "scaling.md"
WORKLOADS = ("sleeping", "lockstep", "computing")
ACTORS, LEARNERS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000), (1, 4, 16, 64)
SHOWN = (1, 10, 100, 1000, 10_000)
CORES, GIGABITS = 16, 10.0
COLOURED = "<style>:root{--ink:#57606a;--grid:#d0d7de;--bad:#c9242b}text{font:11px sans-serif}</style>"


def costs_from(values: Mapping[str, Any]) -> Costs:
    """Costs as a JSON file has them."""
    return Costs(**{name: Cost(**value) if isinstance(value, Mapping) else value for name, value in values.items()})


def judgement(result: Mapping[str, Any]) -> str:
    """Measured and predicted, for every run that was not used for calibration."""
    head = ("seed", "actors", "learners", "env steps/s measured", "predicted", "off", "idle measured", "predicted", "lag measured",
            "predicted")
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for run in result["runs"]:
        for row in run.get("judged", []):
            seen, said = row["measured"], row["predicted"]
            rows.append(f"| {run['seed']} | {row['actors']} | {row['learners']} | {seen['env_steps_per_second']:,.0f} | "
                        f"{said['env_steps_per_second']:,.0f} | {100 * row['off']:+.0f} %{'' if row['met'] else ' **missed**'} | "
                        f"{100 * seen['learner_idle']:.0f} % | {100 * said['learner_idle']:.0f} % | {seen['policy_lag']:.1f} | "
                        f"{said['policy_lag']:.1f} |")
    about = result["machine"]
    return (f"{result['date']}, commit {result['commit']}, {about['cores']} cores of {about['cpu']}: "
            f"**{'met' if result['met'] else 'not met'}**.\n\n" + "\n".join(rows))


def curves(result: Mapping[str, Any]) -> dict[int, list[Forecast]]:
    """The first seed's costs, on nodes that are not there."""
    run = next(run for run in result["runs"] if "costs" in run)
    costs = costs_from(run["costs"])
    how = {"batch": run["batch"], "depth": run["depth"], "lockstep": run["lockstep"]}
    return {learners: [simulate(costs, Cluster.of(n, learners, CORES, GIGABITS), n, learners, **how) for n in ACTORS]
            for learners in LEARNERS}


def sizes_table(found: Mapping[int, Sequence[Forecast]]) -> str:
    rows = ["| learners | actors | nodes | env steps/s | learner idle | lag | first bottleneck |", "|" + "---|" * 7]
    rows += [f"| {row.learners} | {row.actors:,} | {row.nodes:,} | {row.env_steps_per_second:,.0f} | "
             f"{100 * row.learner_idle:.0f} % | {row.policy_lag:,.1f} | {row.bottleneck} |"
             for many in found.values() for row in many if row.actors in SHOWN]
    return "\n".join(rows)


def picture(name: str, found: Mapping[int, Sequence[Forecast]]) -> str:
    """Env steps/s over actors, both in powers of ten."""
    chart = [Polyline(f"{learners} learner{'s' * (learners > 1)}", [(math.log10(row.actors), math.log10(row.env_steps_per_second))
                                                                    for row in many], COLOURS[k]) for k, (learners, many) in
             enumerate(found.items())]
    drawn = lines(f"{name}: env steps/s", chart, "actors, as a power of ten", "env steps/s, as a power of ten")
    head, rest = drawn.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg">{COLOURED}{rest}\n'


def write(page: Path = PAGE, results: Path = RESULTS) -> None:
    text = page.read_text(encoding="utf-8")
    for name in WORKLOADS:
        path = results / f"scaling-{name}.json"
        shown = [f"Not measured yet: run `python -m evidence --only scaling-{name}`."] * 2
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": []}
        if any("costs" in run for run in result["runs"]):
            found = curves(result)
            (results / f"scaling-{name}.svg").write_text(picture(name, found), encoding="utf-8")
            drawn = f"![env steps/s over actors](results/scaling-{name}.svg)\n\n{sizes_table(found)}"
            shown = [f"{part}\n\n{UNMEASURED}" for part in (judgement(result), drawn)]
        for marker, part in zip((f"{name}-judged", f"{name}-curves"), shown, strict=True):
            text = insert(text, marker, part)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
    sys.stdout.write(f"wrote {PAGE}\n")
