"""What CURL's contrastive loss makes of an encoder, without any reward (specs/value.md 12d): PixelCatch, a random policy.

    accuracy   share of crops whose likeliest key, of 32, shows the same board
    probe      a linear classifier of ball column minus paddle column (9 classes) from codes of centres, learned on half of the
               boards and judged on the other half. Absolute columns are what crops are meant to remove.

A run is the whole representation learner of curl_rainbow (its projection and scale), of 64-number codes, for 2,000 updates of 64
frames. Boards that are translations of each other look alike in some crops: by the true probabilities of all crops, the best
accuracy that is possible is 0.935.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from evidence.lines import Line, apart, side_by_side
from shoal import algorithms, envs
from shoal.acting import Progress
from shoal.algorithms import curl
from shoal.algorithms.common.contrast import ENCODER
from shoal.algorithms.curl import RepresentationLearn
from shoal.nets import NetConfig

__all__ = ["LINES", "trial"]

PIXELS, SEEDS = "shoal/PixelCatch-v0", (1, 2, 3)
FRAMES, UPDATES, BATCH, JUDGED = 4_000, 2_000, 64, 32
HEAD = {"code_size": 64, "projection": (256, 128), "logit_scale": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {"crops, m = 0.95": {}, "no crops": {"crop": 28}, "m = 1": {"key_momentum": 1.0}}


def frames(seed: int) -> np.ndarray:
    env, rng = envs.make(PIXELS, 8), np.random.default_rng(seed)
    step, seen = env.reset(seed=seed), []
    while len(seen) * 8 < FRAMES:
        seen.append(step.observation.copy())
        step = env.step(rng.integers(0, 3, 8))
    return np.concatenate(seen)


def boards(images: np.ndarray) -> np.ndarray:
    """Ball row, ball column and paddle column of each image [N, 3]; in the last row the ball may hide the paddle."""
    cells, found = images[:, 0, 4:24:2, 9:19:2] > 0, []
    for board in cells:
        rows, columns = board[:9].nonzero()
        low = board[9].nonzero()[0]
        found.append((rows[0], columns[0], low[0]) if len(rows) else (9, low[0], low[-1]))
    return np.array(found)


def accuracy(learn: RepresentationLearn, images: np.ndarray, rng: np.random.Generator) -> float:
    shown = images[rng.integers(len(images), size=JUDGED)]
    (minibatch,) = learn.minibatches({"observation": shown}, np.zeros(0), Progress(), rng)
    assert learn.target is not None
    mine, others = learn.model.representation, learn.target.representation
    assert mine is not None and mine.comparison is not None and others is not None
    with torch.no_grad():
        logits = mine.comparison(mine.projected(minibatch.items["query"]), others.projected(minibatch.items["key_view"]))
    state = boards(shown)
    return float((state[logits.argmax(1).numpy()] == state).all(1).mean())


def probe(learn: RepresentationLearn, images: np.ndarray) -> float:
    """Accuracy of the linear classifier on boards that it has not seen."""
    different = np.unique(images.reshape(len(images), -1), axis=0).reshape(-1, *images.shape[1:])
    state, order = boards(different), np.random.default_rng(0).permutation(len(different))
    with torch.no_grad():
        codes = learn.model.see(torch.from_numpy(different)).double()
    label, half = torch.from_numpy(state[:, 1] - state[:, 2] + 4), len(order) // 2
    known, asked = order[:half], order[half:]
    codes = (codes - codes[known].mean(0)) / (codes[known].std(0) + 1e-6)
    x = torch.cat([codes, torch.ones(len(codes), 1)], 1)
    weight = torch.zeros(x.shape[1], 9, dtype=torch.float64, requires_grad=True)
    fit = torch.optim.LBFGS([weight], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        fit.zero_grad()
        found = F.cross_entropy(x[known] @ weight, label[known]) + 1e-3 * weight.square().sum()
        found.backward()
        return found

    fit.step(loss)
    return float(((x[asked] @ weight).argmax(1) == label[asked]).double().mean())


def trial(seed: int, **options: Any) -> dict[str, float]:
    """One encoder: before and after its updates."""
    torch.set_num_threads(1)
    config = curl.Config(**{**HEAD, **options}, dqn=curl.CURLDiscreteOptions(lr=1e-3))
    made = algorithms.make(config, envs.describe(PIXELS), NetConfig(), 8)
    assert isinstance(made, curl.CURL)
    learn, images, rng = made.representation(seed), frames(seed), np.random.default_rng(seed)
    found = {"probe before": round(probe(learn, images), 3)}
    losses, hits = [], []
    for update in range(UPDATES):
        batch = {"observation": images[rng.integers(len(images), size=BATCH)]}
        (minibatch,) = learn.minibatches(batch, np.zeros(0), Progress(), rng)
        gradient, metrics = learn.gradients(minibatch, ENCODER)
        learn.apply(gradient, ENCODER)
        if update >= UPDATES - 200:
            losses.append(metrics["contrast_loss"])
            hits.append(accuracy(learn, images, rng))
    return {**found, "probe": round(probe(learn, images), 3), "accuracy": round(statistics.mean(hits), 3),
            "loss": round(statistics.mean(losses), 3)}


def contrast(_: int) -> dict[str, Any]:
    cases = [(name, seed) for name in SETTINGS for seed in SEEDS]
    runs = side_by_side(lambda case: {"seed": case[1], **apart("evidence.contrast", seed=case[1], **SETTINGS[case[0]])}, cases)
    each = {name: [run for (whose, _), run in zip(cases, runs, strict=True) if whose == name] for name in SETTINGS}
    middle = {name: {key: statistics.median(run[key] for run in some) for key in ("accuracy", "loss", "probe before", "probe")}
              for name, some in each.items()}
    first, uncropped, frozen = (middle[name] for name in SETTINGS)
    met = {"accuracy >= 0.9": first["accuracy"] >= 0.9,
           "probe 10 points above a random encoder": first["probe"] >= first["probe before"] + 0.1,
           "no crops: a worse probe": uncropped["probe"] < first["probe"], "m = 1: a worse probe": frozen["probe"] < first["probe"]}
    return {"met": all(met.values()), "statements": met, "medians": middle, "each": each}


WORDS = ("PixelCatch, frames of a random policy, medians of 3 seeds: contrastive accuracy >= 0.9; a linear probe of ball minus "
         "paddle is at least 10 points above that of a random encoder, and worse without crops and with keys that never move "
         "(m = 1)")
LINES = [Line("mechanism-curl-contrast", 18, WORDS, contrast, seeds=(0,))]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(trial(**json.loads(sys.argv[1]))) + "\n")
