"""Safe in-context reinforcement learning in JAX.

Importing the package registers its environments with Gymnasium, when that is installed, by name only: neither
JAX nor an environment is loaded before `gymnasium.make` asks for one.
"""

GYM_IDS = {"safeicrl/SafeDarkRoom-v0": "safe-dark-room"}  # Gymnasium id → name in envs/registry.py


def _register_with_gymnasium() -> None:
    try:
        import gymnasium
    except ImportError:  # the core works without it
        return
    for gym_id, name in GYM_IDS.items():
        if gym_id not in gymnasium.registry:
            # No max_episode_steps: the environments truncate themselves, a TimeLimit on top would only hide it.
            gymnasium.register(id=gym_id, entry_point="safeicrl.envs.gym:GymEnv", kwargs={"env": name})


_register_with_gymnasium()
