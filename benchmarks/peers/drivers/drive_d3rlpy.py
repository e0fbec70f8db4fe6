"""d3rlpy's IQL or TD3+BC on a file of steps, timed once its first updates are made."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import d3rlpy
import numpy as np
import torch


def main(order: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(order["threads"])
    d3rlpy.seed(order["seed"])
    with np.load(order["data"]) as file:
        columns = [file[name] for name in ("observations", "actions", "rewards", "terminals", "timeouts")]
    data = d3rlpy.dataset.MDPDataset(*columns)
    encoder = d3rlpy.models.VectorEncoderFactory(hidden_units=order["hidden"])
    more = {"actor_encoder_factory": encoder, "critic_encoder_factory": encoder, "batch_size": order["batch"]}
    if order["algorithm"] == "iql":
        config = d3rlpy.algos.IQLConfig(value_encoder_factory=encoder, **more)
    else:
        config = d3rlpy.algos.TD3PlusBCConfig(observation_scaler=d3rlpy.preprocessing.StandardObservationScaler(), **more)
    some, marks = 100, []
    fitter = config.create(device="cpu").fitter(data, n_steps=10**9, n_steps_per_epoch=some, show_progress=False,
                                                logger_adapter=d3rlpy.logging.NoopAdapterFactory())
    for epoch, _ in fitter:
        marks.append((time.perf_counter(), epoch * some))
        if marks[-1][0] - marks[0][0] >= order["seconds"] and len(marks) > 2:
            return {"marks": [marks[0], marks[-1]]}
    raise RuntimeError("it has ended")


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
