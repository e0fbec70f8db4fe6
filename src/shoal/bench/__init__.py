"""How fast, how fast could it be, and beside whom.

    limits.py, probe.py     the composed limit of a workload: 1 / (1/e + 1/i + r/l), each part measured alone
    reference_loop.py       the hand-written synchronous loop that a good engineer would write without shoal
    cases.py                what is measured
    measure.py              alternating runs, each in processes of its own; medians and spread
    __main__.py             `make bench`: the efficiency table, and docs/results/bench.json
    peers/                  `make bench-peers`: Sample Factory, RLlib and SB3 beside shoal, and docs/results/peers.json
    report.py               writes both into docs/performance.md
"""
