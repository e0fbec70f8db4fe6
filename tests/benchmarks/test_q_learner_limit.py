"""The value-based learners' rates, in small and on the CPU."""

import json

import torch

from benchmarks import q_learner_limit


def test_both_learners_are_measured(capsys):
    threads = torch.get_num_threads()
    try:
        q_learner_limit.main(["--small", "--device", "cpu", "--seconds", "0"])
    finally:
        torch.set_num_threads(threads)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["learner"], row["items"]) for row in rows] == [("dqn", 16), ("r2d2", 4)]
    assert all(row["updates_per_second"] > 0 for row in rows)
