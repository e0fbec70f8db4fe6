"""What ddpg, td3 and sac share: items of a replay table in; an actor, and critics of its actions, out."""
