"""Registers the environments with Gymnasium by name only: none, and no JAX, is loaded before one is made."""

GYM_IDS = {  # Gymnasium's id → name in envs/registry.py
    "safeicrl/SafeDarkRoom-v0": "safe-dark-room",
    "safeicrl/SafeDarkPoint-v0": "safe-dark-point",
    "safeicrl/SafeDarkCar-v0": "safe-dark-car",
    "safeicrl/SafeVelocityHalfCheetah-v0": "safe-velocity-half-cheetah",
    "safeicrl/SafeVelocityAnt-v0": "safe-velocity-ant",
}


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
