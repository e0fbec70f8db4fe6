"""CURL of issue 18: the presets as shipped, and a detached encoder against a frozen one; contrast.py looks at the encoder alone."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from evidence import contrast
from evidence.learning import reaches
from evidence.lines import Line
from evidence.value_mechanisms import compared

__all__ = ["LINES"]

SEEDS = (1, 2, 3, 4, 5)  # seeds 11 to 13 were looked at while values were tuned
PIXELS = "shoal/PixelCatch-v0"
CODE = 12


def learns(preset: str) -> Line:
    """Of 5 seeds 4 must meet it."""
    line = reaches(f"{preset}-pixelcatch", 18, f"{preset} on PixelCatch", preset, PIXELS, goal=0.9, budget=15_000)
    return replace(line, seeds=SEEDS, least=4)


def detached(_: int) -> dict[str, Any]:
    """Values learned from codes that they have no part in: of an encoder that contrast teaches, through the projection of
    curl_rainbow, and of one that nobody does. Codes have 12 numbers: in the preset's 32 even random ones hold what Catch needs
    (specs/value.md 12d: calibrate the width; 12 was chosen on seeds 11 to 13)."""
    base = {"preset": "curl", "env": PIXELS, "every": 100, "episodes": 100, "most_env_steps": 10_000}
    detached = {"algorithm.detached": True, "algorithm.code_size": CODE}
    settings: dict[str, dict[str, Any]] = {
        "learned by contrast": {**detached, "algorithm.projection": [256, 128], "algorithm.logit_scale": 0.1},
        "frozen": {**detached, "algorithm.contrast": 0.0}}
    runs = compared({name: {**base, "overrides": values} for name, values in settings.items()}, SEEDS)
    scores = {name: [run["score"] for run in some] for name, some in runs.items()}
    middle = {name: {"return": round(statistics.median(some), 3), "mean of the seeds": round(statistics.mean(some), 3)}
              for name, some in scores.items()}
    learned, frozen = (middle[name]["return"] for name in settings)
    return {"met": learned >= frozen + 0.1, "medians": middle, "each": runs}


LINES = [
    *(learns(preset) for preset in ("curl", "curl_rainbow", "curl_async")),
    Line("mechanism-curl-detached", 18, f"curl on PixelCatch, codes of {CODE} numbers, 10,000 env steps, medians of 5 seeds: "
         "values learned from the codes of a detached encoder return at least 0.1 more than those learned from a frozen random one",
         detached, seeds=(0,)),
    *contrast.LINES,
]
