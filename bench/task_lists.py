"""Write the frozen task lists that ship with the library; a new version is a new set of tasks."""

from safeicrl.envs.registry import make_env
from safeicrl.evaluation.task_lists import write_lists

WORLDS = (
    "safe-dark-room",
    "safe-dark-point",
    "safe-dark-car",
    "safe-velocity-half-cheetah",
    "safe-velocity-ant",
)

if __name__ == "__main__":
    for world in WORLDS:
        print(write_lists(make_env(world)))
