"""Scripts of our own that run inside the peers' virtual environments, calling the peers' public interfaces.

Only same_env.py is also imported by shoal. Each script takes one JSON object and prints one as its last line:

    {"scene": "cartpole" | "pong", "seconds": 12, "seed": 0, ...}  ->  {"marks": [[seconds, env_steps], ...], ...}
"""
