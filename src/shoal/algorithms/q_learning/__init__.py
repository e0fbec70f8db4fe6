"""What dqn and r2d2 share: items of a replay table in, action values out."""
