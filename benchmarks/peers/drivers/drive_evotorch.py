"""EvoTorch's PGPE with a fixed deviation, which is OpenAI's ES: mirrored samples, centred ranks, Adam. All members play CartPole at
once.

    python drive_evotorch.py '{"seconds": 10, "seed": 1, "population": 64, "hidden": 32}'
"""

import json
import sys
import time

import torch
from evotorch.algorithms import PGPE
from evotorch.neuroevolution import VecGymNE

WARM_ITERATIONS = 2


def main(order):
    torch.set_num_threads(1)
    network = f"Linear(obs_length, {order['hidden']}) >> Tanh() >> Linear({order['hidden']}, act_length)"
    problem = VecGymNE("gym::CartPole-v1", network, max_num_envs=order["population"], observation_normalization=True)
    problem.manual_seed(order["seed"])
    searcher = PGPE(problem, popsize=order["population"], center_learning_rate=0.05, stdev_learning_rate=0.0, stdev_init=0.1,
                    optimizer="adam", ranking_method="centered", symmetric=True)
    marks = []
    while not marks or len(marks) <= WARM_ITERATIONS or marks[-1][0] - marks[WARM_ITERATIONS][0] < order["seconds"]:
        searcher.step()
        marks.append((time.perf_counter(), int(problem.status["total_interaction_count"])))
    (began, first), (ended, last) = marks[WARM_ITERATIONS], marks[-1]
    print(json.dumps({"env_steps_per_second": (last - first) / (ended - began), "iterations": len(marks) - 1,
                      "mean_return": float(searcher.status["mean_eval"])}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
