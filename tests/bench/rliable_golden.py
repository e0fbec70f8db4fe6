"""Makes rliable_golden.json, which test_statistics.py holds shoal's statistics against.

rliable brings pandas, matplotlib, statsmodels and 16 more packages (510 MB), so it is no dependency of the tests. Once, in an
environment of its own (pandas 3 breaks the `arch` package that rliable 1.2.0 needs):

    python3.11 -m venv .peers/rliable && .peers/rliable/bin/pip install rliable==1.2.0 "pandas<3"
    .peers/rliable/bin/python tests/bench/rliable_golden.py
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
from rliable import library, metrics

TAUS = [0.0, 0.5, 1.0, 2.0, 3.0, 5.0]


def main() -> None:
    draw = np.random.RandomState(7)
    x, y = (np.round(draw.gamma(2.0, scale, (runs, 4)), 3) for scale, runs in ((1.0, 5), (1.2, 7)))
    y[:2, 0] = x[:2, 0]  # ties
    np.random.seed(0)
    both = {"x": x, "y": y}
    iqm, iqm_interval = library.get_interval_estimates(both, lambda s: np.array([metrics.aggregate_iqm(s)]), reps=20000)
    better, better_interval = library.get_interval_estimates(
        {"xy": [x, y]}, lambda a, b: np.array([metrics.probability_of_improvement(a, b)]), reps=4000)
    profile, _ = library.create_performance_profile(both, np.array(TAUS), reps=100)
    found = {
        "versions": {name: version(name) for name in ("rliable", "arch", "scipy", "numpy", "pandas")},
        "x": x.tolist(), "y": y.tolist(), "taus": TAUS,
        "iqm": {name: float(value[0]) for name, value in iqm.items()},
        "iqm_interval": {name: value[:, 0].tolist() for name, value in iqm_interval.items()},
        "improvement": float(better["xy"][0]), "improvement_interval": better_interval["xy"][:, 0].tolist(),
        "profile": {name: value.tolist() for name, value in profile.items()},
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
