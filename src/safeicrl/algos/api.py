"""What an algorithm is: three pure functions over one train state, and a card for its policies."""

from typing import Any, Protocol

import jax

from safeicrl.agents.api import Agent
from safeicrl.envs.api import Env, Key, PyTree

# Every update reports these, or those that the algorithm names in an attribute `metrics` of its own, "env_steps"
# among them (Safe AD plays no episodes while it learns). `train` logs them by these names and refuses an iteration
# in which one of them, or any metric whose name contains "loss" or "grad", is not finite. Other metrics may be (a
# share per budget bin is nan when the bin was empty).
METRICS = ("env_steps", "return", "cost", "budget", "over_budget", "lambda")


class Algorithm(Protocol):
    """One learning algorithm on one environment. Frozen: all that changes is in the train state.

    Where it holds large arrays (a data set), it is a pytree (an Equinox module) itself: then they are arguments of
    the compiled program and not constants in it.

    The train state is a pytree whose array leaves are everything that changes (parameters, optimiser,
    multiplier, normalisers, replay, step counters) and which has a field `key`. Its floating-point leaves are
    always finite: an iteration that breaks this is rolled back, all but its key.
    """

    @property
    def env(self) -> Env:
        """The environment it learns on."""
        ...

    @property
    def config(self) -> Any:
        """Its settings, a frozen dataclass."""
        ...

    def init(self, key: Key) -> PyTree:
        """The state before the first update."""
        ...

    def update(self, state: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        """One iteration: collect trials, learn. Metrics are scalars or small vectors, `METRICS` among them.

        "env_steps" counts the steps this iteration learned from, played or read; "return", "cost" and "budget" are
        means over episodes; "over_budget" is the share of episodes over their budget.
        """
        ...

    def start_from(self, state: PyTree, other: PyTree) -> PyTree:
        """A new run's `state` with the networks of another run's; all else (multiplier, schedules) begins anew."""
        ...

    def agent(self, state: PyTree) -> Agent:
        """The policy of this state, frozen."""
        ...

    def card(self) -> dict[str, Any]:
        """What rebuilds the agent around its arrays: "kind" (see policy.py) and whatever that kind needs."""
        ...
