"""Scripts of our own that run inside the peers' virtual environments, calling the peers' public interfaces.

Only same_env.py is also imported by shoal. Each script takes one JSON object and prints one as its last line:

    {"scene": "cartpole" | "pong", "seconds": 12, "seed": 0, ...}  ->  {"marks": [[seconds, env_steps], ...], "began_at": ..., ...}

The seconds of marks are those of its own clock, which it started at `began_at` (time.time()). It may tell train_return and
samples_per_insert; with a "goal" (goal_evaluator.py), seconds and eval_return say when it was reached, or are null.
"""
