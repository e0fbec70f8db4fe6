"""Experiments: configuration, run directory, checkpoints, evaluation, resume. Begin with run.py and session.py."""
