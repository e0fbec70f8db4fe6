"""What a2c, ppo, appo and vtrace share: unrolls in, a policy and its value function out."""
