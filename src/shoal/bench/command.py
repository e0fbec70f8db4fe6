"""`shoal bench SUITE` and `shoal bench compare A B`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.bench.ledger import Ledger
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.bench.suite import Job, Suite

__all__ = ["bench_command", "run_suite"]

USAGE = """\
shoal bench SUITE [--suite quick] [--only WORDS] [--out FOLDER]     run a suite, or go on with it
shoal bench compare A B                                             two folders of results: ratios, and which are noise

Suites: {suites}, or the path of a TOML file.
A suite's cases are run one after the other. FOLDER (runs/bench/SUITE) gets results.jsonl, results.md and report.html; give it
again after an interruption, and what is finished is not run again.
"""


@dataclass(frozen=True)
class Options:
    """Run a suite of the unified benchmark, or go on with it."""

    suite: str = "full"
    """full, or quick: the same cases, fewer and shorter."""
    only: str = ""
    """Only cases whose name holds these words."""
    out: str | None = None
    """The folder of the results; runs/bench/SUITE by default."""


def bench_command(arguments: list[str]) -> int:
    from shoal.bench.suite import load_suite, suite_names
    from shoal.experiment.parse import parse_options, split_positionals

    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE.format(suites=", ".join(suite_names())))
        return 0 if arguments else 2
    if arguments[0] == "compare":
        return _compare(arguments[1:])
    positionals, rest = split_positionals(arguments, 1)
    if len(positionals) != 1:
        raise ConfigError(f"shoal bench {' '.join(arguments)}: give one suite ({', '.join(suite_names())})")
    options = parse_options(Options, Options(), rest, "shoal bench SUITE")
    suite = load_suite(positionals[0], options.suite)
    default = Path("runs") / "bench" / (suite.name + ("-quick" if options.suite == "quick" else ""))
    return run_suite(suite, Ledger(Path(options.out) if options.out else default), options.only)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_suite(suite: Suite, ledger: Ledger, only: str = "") -> int:
    """Every job that is not finished yet; the table and the report are written anew after each."""
    from shoal.bench import machine
    from shoal.bench.report_files import write_files

    jobs = [job for job in suite.jobs() if only.lower() in job.group.lower()]
    if not jobs:
        raise ConfigError(f"--only {only!r} fits no case of {suite.name}; there are {', '.join(case.name for case in suite.cases)}")
    finished = ledger.finished()
    waiting = [job for job in jobs if job.key not in finished]
    if waiting:
        ledger.append("session", {"suite": suite.name, "title": suite.title, **machine.describe()})
    say(f"{suite.title}: {len(jobs)} runs" + (f", {len(jobs) - len(waiting)} of them finished before" if finished else ""))
    started = time.monotonic()
    try:
        _run_all(waiting, ledger)
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on from {ledger.path}")
        raise
    table = write_files(ledger)
    say(f"\n{table}\n\n{time.monotonic() - started:.0f} s; {ledger.folder} has results.jsonl, results.md and report.html")
    if not waiting:
        say("everything was finished before; give another --out to measure again")
    return int(any(row["error"] for row in ledger.rows()))


def _run_all(waiting: Sequence[Job], ledger: Ledger) -> None:
    from shoal.bench import jobs
    from shoal.bench.report_files import write_files
    from shoal.bench.yardstick import Yardstick

    with Yardstick(ledger, say) as yardstick:
        for number, job in enumerate(waiting, 1):
            row = {"key": job.key, "group": job.group, "seed": job.seed, "case": job.case.name, "preset": job.case.preset,
                   "peer": job.case.peer, "env": job.case.env, "runtime": job.case.runtime, "asked_actors": job.actors,
                   "until_return": job.case.until_return, **jobs.run_job(job)}
            if not row["error"]:
                row["limit"] = yardstick.beside(job)
                if row["limit"] and row.get("env_steps_per_second"):
                    row["efficiency"] = row["env_steps_per_second"] / row["limit"]["env_steps_per_second"]
            ledger.append("row", row)
            say(f"  {number}/{len(waiting)}  {job.group}, seed {job.seed}: {_words(row)}")
            write_files(ledger)


def _words(row: dict[str, Any]) -> str:
    from shoal.bench.tables import short

    if row["error"]:
        return f"FAILED: {row['error']}"
    if "rates" in row:
        return ", ".join(f"{name} {short(value)}/s" for name, value in row["rates"].items())
    parts = [f"{short(row.get('env_steps_per_second'))} env steps/s"]
    if row.get("efficiency") is not None:
        parts.append(f"{100 * row['efficiency']:.0f} % of the limit")
    if row["until_return"] is not None:
        reached = row.get("seconds_to_threshold")
        parts.append(f"missed {row['until_return']:g} with {short(row.get('final_return'))}" if reached is None
                     else f"reached {row['until_return']:g} after {short(reached)} s")
    return ", ".join(parts)


def _compare(arguments: list[str]) -> int:
    from shoal.bench.compare import comparison

    if len(arguments) != 2:
        raise ConfigError(f"shoal bench compare {' '.join(arguments)}: give two folders of results, the old one first")
    say(comparison(Ledger.open(arguments[0]), Ledger.open(arguments[1])))
    return 0
