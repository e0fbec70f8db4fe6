"""The modules that every role of an experiment imports: a fork server imports them once, and its processes share their memory."""

__all__ = ["PRELOAD"]

PRELOAD = ("numpy", "cloudpickle", "setproctitle", "gymnasium", "torch", "shoal.envs", "shoal.runtime.place",
           "shoal.algorithms.actor_critic.learn", "shoal.algorithms.actor_critic.model", "shoal.nets", "shoal.roles.learner",
           "shoal.experiment.checkpoints")
