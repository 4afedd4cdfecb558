"""Workshop: the smallest world with two costs, heat and noise. Its best policy is known for every pair of budgets.

Every step is one of three: rest pays ¼ and costs nothing, the torch costs 1 of heat, the saw 1 of noise. One tool,
the sharp one, pays 1 and the other ½. Which one is hidden; the first use tells. Both budgets bind. Where they allow
more uses than an episode has steps, it pays to know the sharp tool.
"""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from safeicrl.budgets import Range
from safeicrl.envs.api import EnvSpec, Key, Split, Step
from safeicrl.envs.spaces import Box, Discrete
from safeicrl.errors import check_integer

REST, BLUNT, SHARP = 0.25, 0.5, 1.0  # pay of a step


@dataclass(frozen=True)
class Workshop:
    """Action 0 rests, 1 takes the torch, 2 the saw. A task is the number of the sharp tool."""

    max_steps: int = 3  # of an episode
    episodes: int = 3  # of a trial
    heat: Range = (0.0, 3.0)  # range of its budget, in training and in the test
    noise: Range = (0.0, 3.0)  # likewise

    def __post_init__(self) -> None:
        check_integer("max_steps", self.max_steps, 1)

    @property
    def spec(self) -> EnvSpec:
        """Two costs, each with a budget of its own."""
        return EnvSpec(
            observation=Box(1, 0.0, 0.0), action=Discrete(3), max_steps=self.max_steps, episodes=self.episodes,
            train_budget=(self.heat, self.noise), test_budget=(self.heat, self.noise), cost_unit=1.0,
            task_features=1, costs=("heat", "noise"),
        )  # fmt: skip

    def sample_task(self, key: Key, split: Split) -> jax.Array:
        """The sharp tool, 1 or 2."""
        return jax.random.randint(key, (), 1, 3)

    def reset(self, key: Key, task: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The state is the time; there is nothing to see."""
        return jnp.int32(0), jnp.zeros(1)

    def step(self, key: Key, state: jax.Array, action: jax.Array, task: jax.Array) -> tuple[jax.Array, Step]:
        """Use a tool, or rest."""
        return state + 1, Step(
            observation=jnp.zeros(1),
            reward=jnp.where(action == 0, REST, jnp.where(action == task, SHARP, BLUNT)),
            cost=(action == jnp.array([1, 2])).astype(jnp.float32),  # heat, noise
            terminated=jnp.array(False),
            truncated=state + 1 >= self.max_steps,
        )

    def task_features(self, task: jax.Array) -> jax.Array:
        """Which tool is sharp."""
        return (task - 1).astype(jnp.float32)[None]

    def best(self, heat: float, noise: float, sharp: int) -> float:
        """The greatest return of an episode within both budgets, the sharp tool being known: by enumeration."""
        pay = [SHARP if tool == sharp else BLUNT for tool in (1, 2)]
        uses = itertools.product(range(int(heat) + 1), range(int(noise) + 1))
        allowed = ((torch, saw) for torch, saw in uses if torch + saw <= self.max_steps)
        return max(torch * pay[0] + saw * pay[1] + (self.max_steps - torch - saw) * REST for torch, saw in allowed)
