"""How fast, how fast could it be, and beside whom.

    limits.py, probe.py     the composed limit of a workload: 1 / (1/e + 1/i + r/l), each part measured alone
    reference_loop.py       the hand-written synchronous loop that a good engineer would write without shoal
    cases.py                what is measured
    measure.py              alternating runs, each in processes of its own; medians and spread
    __main__.py             `make bench`: the efficiency table, and docs/results/bench.json
    peers/                  `make bench-peers`: Sample Factory, RLlib and SB3 beside shoal, and docs/results/peers.json
    race.py                 seconds of training to a return, and the rule by which everybody is judged
    means.py                each means of going faster, with and without it, and docs/results/means.json
    startup.py              seconds to the first step, memory of the actors, and docs/results/startup.json
    report.py               writes all of these into docs/performance.md

and `shoal bench`, the unified benchmark (docs/benchmark.md):

    suite.py, suites/       suites of cases, as TOML                     command.py      the command; what runs beside what
    jobs.py, watch.py       one run: shoal, a peer or a replay buffer    yardstick.py    the composed limit beside it
    children.py             its processes, which must not outlive it
    ledger.py               results.jsonl, appended to and resumed       columns.py      what every run is asked
    statistics.py           interquartile means, bootstrap, profiles     compare.py      two results, and what is noise
    html.py, svg.py         the offline report                           readme.py       the table of the README
"""
