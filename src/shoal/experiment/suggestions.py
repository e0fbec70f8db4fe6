"""What was probably meant: the nearest known word, or what other libraries call it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["closest", "translated"]

OPTIONS = {  # as other libraries spell them -> ours; the first that there is
    "learning_rate": ("algorithm.lr", "algorithm.actor_lr"), "policy_lr": ("algorithm.actor_lr",), "q_lr": ("algorithm.critic_lr",),
    "total_timesteps": ("max_env_steps",), "timesteps": ("max_env_steps",),
    "num_timesteps": ("max_env_steps",), "total_steps": ("max_env_steps",), "max_steps": ("max_env_steps",),
    "n_steps": ("algorithm.unroll", "algorithm.n_step"), "num_steps": ("algorithm.unroll", "algorithm.n_step"),
    "rollout_length": ("algorithm.unroll",), "rollout_fragment_length": ("algorithm.unroll",),
    "unroll_length": ("algorithm.unroll",),
    "n_envs": ("architecture.envs_per_actor",), "num_envs": ("architecture.envs_per_actor",),
    "num_envs_per_worker": ("architecture.envs_per_actor",), "num_workers": ("actors",), "n_workers": ("actors",),
    "num_actors": ("actors",), "num_env_runners": ("actors",), "num_rollout_workers": ("actors",), "num_learners": ("learners",),
    "batch_size": ("algorithm.minibatches", "replay.batch_size", "architecture.batch_slots"), "buffer_size": ("replay.capacity",),
    "replay_size": ("replay.capacity",), "learning_starts": ("replay.min_size",), "n_epochs": ("algorithm.epochs",),
    "num_epochs": ("algorithm.epochs",), "update_epochs": ("algorithm.epochs",), "num_minibatches": ("algorithm.minibatches",),
    "ent_coef": ("algorithm.entropy", "algorithm.alpha"), "entropy_coef": ("algorithm.entropy",),
    "entropy_coeff": ("algorithm.entropy",),
    "vf_coef": ("algorithm.value_weight",), "value_coef": ("algorithm.value_weight",), "max_grad_norm": ("algorithm.grad_norm",),
    "clip_range": ("algorithm.clip",), "clip_coef": ("algorithm.clip",), "clip_param": ("algorithm.clip",),
    "gae_lambda": ("algorithm.lambda_",), "discount": ("algorithm.gamma",), "tau": ("algorithm.target_tau",),
    "exploration_fraction": ("algorithm.epsilon_steps",), "exploration_final_eps": ("algorithm.epsilon_final",),
    "target_update_interval": ("algorithm.target_period_updates",),
    "target_network_frequency": ("algorithm.target_period_updates",),
    "train_freq": ("replay.samples_per_insert",), "train_frequency": ("replay.samples_per_insert",),
    "gradient_steps": ("replay.samples_per_insert",), "start_timesteps": ("algorithm.random_steps",),
    "action_noise": ("algorithm.noise",), "exploration_noise": ("algorithm.noise_std",), "expl_noise": ("algorithm.noise_std",),
    "policy_noise": ("algorithm.target_noise",), "target_policy_noise": ("algorithm.target_noise",),
    "noise_clip": ("algorithm.target_noise_limit",), "target_noise_clip": ("algorithm.target_noise_limit",),
    "policy_freq": ("algorithm.policy_delay",), "policy_frequency": ("algorithm.policy_delay",),
    "init_temperature": ("algorithm.alpha_start",), "temperature": ("algorithm.alpha",),
    "n_atoms": ("algorithm.atoms",), "num_atoms": ("algorithm.atoms",), "noisy": ("algorithm.noisy_sigma",),
    "v_min": ("algorithm.value_min",), "vmin": ("algorithm.value_min",), "v_max": ("algorithm.value_max",),
    "vmax": ("algorithm.value_max",),
    "policy_kwargs": ("net.hidden",), "features_extractor_class": ("net.module",), "verbose": ("console.mode",),
    "net_arch": ("net.hidden",), "hidden_size": ("net.hidden",), "hidden_sizes": ("net.hidden",), "fcnet_hiddens": ("net.hidden",),
    "env_kwargs": ("envs.kwargs",), "env_config": ("envs.kwargs",), "n_eval_episodes": ("eval.episodes",),
    "eval_freq": ("eval.every_env_steps",), "save_freq": ("checkpoint.every_seconds",), "random_seed": ("seed",),
    "num_gpus": ("device",), "cuda": ("device",), "log_dir": ("run_dir",), "logdir": ("run_dir",), "output_dir": ("run_dir",),
}
CONTINUOUS, POLICIES = "there are sac, td3 and ppo", "there are ppo and appo"
VALUES = "there are dqn, double_dqn, rainbow and apex"
ELSEWHERE = {**dict.fromkeys(("tqc", "crossq", "d4pg", "redq", "mpo", "reinforce"), CONTINUOUS),
             **dict.fromkeys(("qrdqn", "qr_dqn", "iqn", "qdqn"), VALUES),
             **dict.fromkeys(("trpo", "acer", "acktr", "ppo2", "ppg"), POLICIES)}
"""Algorithms that other libraries have and shoal has not, and what is nearest."""
OPTIONS_OF_DQN = {"rainbow": "a preset of dqn: shoal train rainbow", "c51": "an option of dqn: --algorithm.atoms 51",
                  "noisynet": "an option of dqn: --algorithm.noisy-sigma 0.5"}
"""What other libraries call algorithms, and what it is here."""


def translated(name: str, known: Iterable[str]) -> str | None:
    """Our key for an option that another library spells so."""
    keys = set(known)
    return next((key for key in OPTIONS.get(name.replace("-", "_"), ()) if key in keys), None)


def closest(word: str, known: Iterable[str], what: str, prefix: str = "") -> str:
    """`; did you mean X?` where something is near, else the list of what there is. All known words have the `prefix`."""
    known = sorted(known)
    if word.casefold() in OPTIONS_OF_DQN and word not in known and "ppo" in known:
        return f"; it is {OPTIONS_OF_DQN[word.casefold()]}"
    if word.casefold() in ELSEWHERE and "ppo" in known:
        return f"; shoal does not have it: {ELSEWHERE[word.casefold()]}"
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if not near:
        folded = {name.casefold(): name for name in known}
        near = [folded[name] for name in difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.5)]
    return f"; did you mean {prefix}{near[0]}?" if near else f"; {what}: {', '.join(known)}"
