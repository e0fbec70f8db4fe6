"""`shoal bench SUITE` and `shoal bench compare A B`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.bench.children import Children
from shoal.bench.ledger import Ledger
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.bench.suite import Job, Suite, SuiteCase

__all__ = ["bench_command", "run_suite"]

USAGE = """\
shoal bench SUITE [--suite quick] [--only WORDS] [--jobs N] [--out FOLDER] [--again]    run a suite, or go on with it
shoal bench compare A B    two folders of results: ratios, and which are noise

Suites: {suites}, or the path of a TOML file.
A suite's cases are run one after the other; with --jobs N so many at once of those that do not measure speed. FOLDER
(runs/bench/SUITE) gets results.jsonl, results.md and report.html; give it again after an interruption, and what is finished is
not run again, unless with --again.
"""


@dataclass(frozen=True)
class Options:
    """Run a suite of the unified benchmark, or go on with it."""

    suite: str = "full"
    """full, or quick: the same cases, fewer and shorter."""
    only: str = ""
    """Only cases whose name holds these words."""
    jobs: int = 1
    """Runs at once, of cases that do not measure speed; those that do always run alone."""
    out: str | None = None
    """The folder of the results; runs/bench/SUITE by default."""
    again: bool = False
    """Measure again what is finished. What was there stays in results.jsonl, and does not count."""


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
    if options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs} is not possible: give 1 or more")
    sys.path.append(os.getcwd())  # for environments of the user's own, as in `shoal train`
    suite = load_suite(positionals[0], options.suite)
    default = Path("runs") / "bench" / (suite.name + ("-quick" if options.suite == "quick" else ""))
    ledger = Ledger(Path(options.out) if options.out else default)
    return run_suite(suite, ledger, options.only, options.jobs, options.suite, options.again)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_suite(suite: Suite, ledger: Ledger, only: str = "", many: int = 1, variant: str = "full", again: bool = False) -> int:
    """Every job that is not finished yet; the table and the report are written anew after each."""
    jobs = [job for job in suite.jobs() if only.lower() in job.group.lower()]
    if not jobs:
        raise ConfigError(f"--only {only!r} fits no case of {suite.name}; there are {', '.join(case.name for case in suite.cases)}")
    with ledger.held():
        return _run_jobs(suite, jobs, ledger, only, many, variant, again)


def _run_jobs(suite: Suite, jobs: Sequence[Job], ledger: Ledger, only: str, many: int, variant: str, again: bool) -> int:
    from shoal.bench.columns import count, failed
    from shoal.bench.report_files import write_files
    from shoal.bench.scratch import sweep

    ledger.belongs(suite.title, variant)
    if torn := ledger.torn():
        say(f"{count(torn, 'line')} of {ledger.path} cannot be read: what stood there does not count")
    sweep()
    if ledger.cases() != suite.marks():
        ledger.append("suite", {"cases": suite.marks()})
    finished = set() if again else ledger.finished()
    waiting = [job for job in jobs if job.key not in finished]
    at_once = many if any(not job.case.alone for job in waiting) else 1
    started = time.monotonic()
    if waiting:
        void = [group for group in ledger.groups() if only.lower() in group.lower()] if again else None
        _open_session(ledger, {"suite": suite.name, "title": suite.title, "variant": variant, "jobs": at_once, "again": void})
    done = len(jobs) - len(waiting)
    say(f"{suite.title}: {count(len(jobs), 'run')}" + (f", {done} of them finished before" if done else ""))
    if many > at_once:
        say("they measure speed, so they run one after the other")
    places = {group: place for place, group in enumerate(suite.marks())}
    try:
        with _stoppable():
            _run_all(waiting, places, ledger, at_once)
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on from {ledger.path}")
        raise
    finally:
        if waiting:
            ledger.append("finish", {"seconds": round(time.monotonic() - started, 1)})
    table = write_files(ledger)
    say(f"\n{table}\n\n{time.monotonic() - started:.0f} s; {ledger.folder} has results.jsonl, results.md and report.html")
    if not waiting:
        say("everything was finished before; --again measures again, or give another --out")
    asked = {(job.group, job.seed) for job in jobs}
    return int(bool(failed([row for row in ledger.rows() if (row["group"], row["seed"]) in asked])))


def _open_session(ledger: Ledger, values: dict[str, Any]) -> None:
    """Its line; and a word where the machine is not quiet."""
    from shoal.bench import machine
    from shoal.bench.columns import count, crowded

    about = machine.describe()
    ledger.append("session", {**values, **about})
    if crowded(about["machine"]):
        load, cores = about["machine"]["load"][0], about["machine"]["cores"]
        say(f"the load is {load:g} on {count(cores, 'core')}: something else is running, and what is measured beside it is worth "
            "little; better wait until the machine is quiet")


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends a suite as Ctrl-C does: with whatever it has started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_all(waiting: Sequence[Job], places: dict[str, int], ledger: Ledger, many: int) -> None:
    from shoal.bench.report_files import write_files
    from shoal.bench.yardstick import Yardstick

    with Yardstick(ledger, say) as yardstick, contextlib.closing(_columns(waiting, many, ledger.folder)) as found:
        for number, (job, columns) in enumerate(found, 1):
            row = {"key": job.key, "group": job.group, "place": places[job.group], "seed": job.seed, "case": job.case.name,
                   "preset": job.case.preset, "peer": job.case.peer, "env": job.case.env, "runtime": job.case.runtime,
                   "asked_actors": job.actors, "until_return": job.case.until_return, "settings": settings(job.case), **columns}
            if not row["error"]:
                row["limit"] = yardstick.beside(job)
                if row["limit"] and row.get("env_steps_per_second"):
                    row["efficiency"] = row["env_steps_per_second"] / row["limit"]["env_steps_per_second"]
            ledger.append("row", row)
            say(f"  {number}/{len(waiting)}  {job.group}, seed {job.seed}: {_words(row)}")
            write_files(ledger)


def settings(case: SuiteCase) -> dict[str, Any]:
    """What a case is given that others are not, but for what names it: `shoal bench compare` says where two differ in it."""
    usual, apart = asdict(type(case)("")), ("name", "actors", "seeds", "who", "quick")
    given = {name: value for name, value in asdict(case).items() if name not in apart and value != usual[name]}
    tables = {name: given.pop(name) for name in ("overrides", "order") if name in given}
    return {**given, **{f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}}


def _columns(waiting: Sequence[Job], many: int, results: Path) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Jobs with what they found, as they end: `many` at once of those that do not measure speed, then the others, each alone."""
    from shoal.bench import jobs

    children = Children()
    together = [job for job in waiting if many > 1 and not job.case.alone]
    with ThreadPoolExecutor(many) as pool:
        running = {pool.submit(jobs.run_job, job, children, results): job for job in together}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            children.end()
            raise
    for job in waiting:
        if job not in together:
            yield job, jobs.run_job(job, children, results)


def _words(row: dict[str, Any]) -> str:
    from shoal.bench.tables import short

    if row["error"]:
        return f"{'not run' if row.get('skipped') else 'FAILED'}: {row['error']}"
    if "rates" in row:
        return ", ".join(f"{name} {short(value)}/s" for name, value in row["rates"].items())
    parts = [f"{short(row.get('env_steps_per_second'))} env steps/s"]
    if row.get("efficiency") is not None:
        parts.append(f"{100 * row['efficiency']:.0f} % of the limit {short(row['limit']['env_steps_per_second'])}")
    elif row.get("env_steps_per_second"):
        parts.append("its limit was not measured")
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
