"""shoal beside Sample Factory, RLlib and SB3, on the same machine in the same run.

    install.py      each peer into a virtual environment of its own under .peers/ (git-ignored)
    drivers/        our own scripts that run there
    lineup.py       who runs with which settings, per scene
    search.py       tries a few settings of each peer, to give it its best
    on_ray.py       `make bench-ray`: shoal's Ray runtime beside RLlib and its own local runtime, docs/results/bench_ray.json
    __main__.py     `make bench-peers`: alternating runs, a table, docs/results/peers.json
"""
