"""Registers the environments with Gymnasium by name only: none, and no JAX, is loaded before one is made."""

GYM_IDS = {"safeicrl/SafeDarkRoom-v0": "safe-dark-room"}  # Gymnasium's id → name in envs/registry.py


def register() -> None:
    """Make the environments known to `gymnasium.make`, when Gymnasium is installed. Called on import."""
    try:
        import gymnasium
    except ImportError:  # the core works without it
        return
    for gym_id, name in GYM_IDS.items():
        if gym_id not in gymnasium.registry:
            # No max_episode_steps: the environments truncate themselves, a TimeLimit on top would only hide it.
            gymnasium.register(id=gym_id, entry_point="safeicrl.envs.gym:GymEnv", kwargs={"env": name})
