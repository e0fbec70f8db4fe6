"""`shoal bench`: presets in environments, measured and compared (docs/benchmark.md). Developers' measurements are in benchmarks/.

    command.py              the command; what runs beside what
    suite.py, suites/       suites of cases, as TOML; suite_checks.py refuses what makes no sense
    jobs.py, training.py    one run
    checkout.py             what only a checkout has: peers, replay workloads, kills, the composed limit, report.html
    child_processes.py      processes of a run, which must not outlive it; parent_death.py, run_folders.py
    rates.py                from counts and times to rates
    results_folder.py       results.jsonl, appended to and resumed; results.md and report.html beside it
    result_columns.py       the columns of the table; text_tables.py
    statistics.py           interquartile means, bootstrap, permutations; compare.py says which differences are noise
    machine.py              where and with what something was measured
"""
