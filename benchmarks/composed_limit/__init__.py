"""The composed limit of a workload, 1 / (1/e + 1/i + r/l), for cases of `shoal bench` with `limit = true`.

    scenes.py          the environments whose limit is known how to measure, with their grids
    limits.py          the limit: each part measured alone, over a grid of batch sizes and of layouts of the cores
    probe.py           one part alone, in a process of its own
    suite_limits.py    the limit beside every run of a suite
"""
