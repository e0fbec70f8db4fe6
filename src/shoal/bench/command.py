"""`shoal bench SUITE` and `shoal bench compare A B`."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.bench import checkout
from shoal.bench.child_processes import ChildProcesses
from shoal.bench.results_folder import ResultsFolder
from shoal.errors import ConfigError
from shoal.options import Options, number
from shoal.telemetry.outputs import say

if TYPE_CHECKING:
    from shoal.bench.suite import Job, Suite, SuiteCase

__all__ = ["bench_command", "run_suite"]

USAGE = """\
shoal bench SUITE [--suite quick] [--only WORDS] [--jobs N] [--out FOLDER] [--again]    run a suite, or continue with it
shoal bench compare A B    two folders of results: ratios, and which are noise

Suites: {suites}, or the path of a TOML file.
Cases run one after the other; with --jobs N, up to N cases that do not measure speed run at once. FOLDER (runs/bench/SUITE) gets
results.jsonl and results.md. After an interruption type the same command again: finished runs are kept. --again measures them
again. From a checkout of shoal it also runs other libraries and replay buffers, kills processes, measures the composed limit and
writes report.html.
"""


@dataclass(frozen=True)
class BenchOptions(Options):
    """Run a benchmark suite, or continue with it."""

    suite: str = "full"
    """full, or quick: fewer cases, each shorter."""
    only: str = ""
    """Only cases whose name contains these words."""
    jobs: int = number(1, at_least=1)
    """How many runs at once, of cases that do not measure speed; those that do always run alone."""
    out: str | None = None
    """The folder of the results; runs/bench/SUITE by default."""
    again: bool = False
    """Measure finished runs again. The old ones stay in results.jsonl and no longer count."""


def bench_command(arguments: list[str]) -> int:
    from shoal.bench.suite import load_suite, suite_names
    from shoal.experiment.parse import parse_command

    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE.format(suites=", ".join(suite_names())))
        return 0 if arguments else 2
    if arguments[0] == "compare":
        return _compare(arguments[1:])
    positionals, options = parse_command(BenchOptions, arguments, 1, "shoal bench SUITE")
    if len(positionals) != 1:
        raise ConfigError(f"shoal bench {' '.join(arguments)}: give one suite ({', '.join(suite_names())})")
    suite = load_suite(positionals[0], options.suite)
    default = Path("runs") / "bench" / (suite.name + ("-quick" if options.suite == "quick" else ""))
    results = ResultsFolder(Path(options.out) if options.out else default)
    return run_suite(suite, results, options.only, options.jobs, options.suite, options.again)


def run_suite(suite: Suite, results: ResultsFolder, only: str = "", many: int = 1, variant: str = "full",
              again: bool = False) -> int:
    """Every job that is not finished yet; the table and the report are written again after each."""
    jobs = [job for job in suite.jobs() if only.lower() in job.group.lower()]
    if not jobs:
        names = ", ".join(case.name for case in suite.cases)
        raise ConfigError(f"--only {only!r} matches no case of {suite.name}; there are {names}")
    with results.locked():
        return _run_jobs(suite, jobs, results, only, many, variant, again)


def _run_jobs(suite: Suite, jobs: Sequence[Job], results: ResultsFolder, only: str, many: int, variant: str, again: bool) -> int:
    from shoal.bench.result_columns import count, failed
    from shoal.bench.results_folder import write_files
    from shoal.bench.run_folders import remove_stale_folders

    results.check_suite(suite.title, variant)
    if lines := results.unreadable_lines():
        say(f"{count(lines, 'line')} of {results.path} cannot be read and does not count")
    remove_stale_folders()
    if results.cases() != suite.settings_hashes():
        results.append("suite", {"cases": suite.settings_hashes()})
    finished = set() if again else results.finished()
    waiting = [job for job in jobs if job.key not in finished]
    at_once = many if any(not job.case.alone for job in waiting) else 1
    started = time.monotonic()
    if waiting:
        void = [group for group in results.groups() if only.lower() in group.lower()] if again else None
        _open_session(results, {"suite": suite.name, "title": suite.title, "variant": variant, "jobs": at_once, "again": void})
    done = len(jobs) - len(waiting)
    say(f"{suite.title}: {count(len(jobs), 'run')}" + (f", {done} of them finished before" if done else ""))
    if many > at_once:
        say("they measure speed, so they run one after the other")
    places = {group: place for place, group in enumerate(suite.settings_hashes())}
    try:
        with _stoppable():
            _run_all(waiting, places, results, at_once)
    except KeyboardInterrupt:
        say(f"interrupted; the same command continues from {results.path}")
        raise
    finally:
        if waiting:
            results.append("finish", {"seconds": round(time.monotonic() - started, 1)})
    table = write_files(results)
    files = "results.jsonl, results.md and report.html" if checkout.benchmarks() else "results.jsonl and results.md"
    say(f"\n{table}\n\n{time.monotonic() - started:.0f} s; {results.folder} has {files}")
    if not waiting:
        say("everything was finished before; give --again to measure it again, or another --out")
    asked = {(job.group, job.seed) for job in jobs}
    return int(bool(failed([row for row in results.rows() if (row["group"], row["seed"]) in asked])))


def _open_session(results: ResultsFolder, values: dict[str, Any]) -> None:
    """Write the session's line, and warn where the machine is not quiet."""
    from shoal.bench import machine
    from shoal.bench.result_columns import count, crowded

    about = machine.describe()
    results.append("session", {**values, **about})
    if crowded(about["machine"]):
        load, cores = about["machine"]["load"][0], about["machine"]["cores"]
        say(f"the load is {load:g} on {count(cores, 'core')}: other programs are running, so these measurements will be of little "
            "worth; better wait until the machine is quiet")


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends a suite as Ctrl-C does, with everything that it started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_all(waiting: Sequence[Job], places: dict[str, int], results: ResultsFolder, many: int) -> None:
    from shoal.bench.results_folder import write_files

    found = checkout.benchmarks()
    meter: AbstractContextManager[checkout.LimitMeter | None]
    meter = contextlib.nullcontext() if found is None else found.limits(results, say)
    with meter as limits, contextlib.closing(_columns(waiting, many, results.folder)) as ended:
        for number, (job, columns) in enumerate(ended, 1):
            row = {"key": job.key, "group": job.group, "place": places[job.group], "seed": job.seed, "case": job.case.name,
                   "preset": job.case.preset, "peer": job.case.peer, "env": job.case.env, "runtime": job.case.runtime,
                   "asked_actors": job.actors, "until_return": job.case.until_return, "settings": settings(job.case), **columns}
            if not row["error"]:
                row["limit"] = limits.measure(job) if limits else None
                if row["limit"] and row.get("env_steps_per_second"):
                    row["efficiency"] = row["env_steps_per_second"] / row["limit"]["env_steps_per_second"]
            results.append("row", row)
            say(f"  {number}/{len(waiting)}  {job.group}, seed {job.seed}: {_words(row)}")
            write_files(results)


def settings(case: SuiteCase) -> dict[str, Any]:
    """A case's values that are not the defaults, without its name: `shoal bench compare` says where two cases differ in them."""
    usual, apart = asdict(type(case)("")), ("name", "actors", "seeds", "who", "quick")
    given = {name: value for name, value in asdict(case).items() if name not in apart and value != usual[name]}
    tables = {name: given.pop(name) for name in ("overrides", "order") if name in given}
    return {**given, **{f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}}


def _columns(waiting: Sequence[Job], many: int, results: Path) -> Generator[tuple[Job, dict[str, Any]]]:
    """Jobs with their columns, as they end: first those that do not measure speed, `many` at once, then the others one by one."""
    from shoal.bench import jobs

    children = ChildProcesses()
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
    from shoal.telemetry.short_numbers import short

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
    say(comparison(ResultsFolder.open(arguments[0]), ResultsFolder.open(arguments[1])))
    return 0
