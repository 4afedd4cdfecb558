"""What an algorithm is: three pure functions over one train state, and a card for its policies."""

from typing import Any, Protocol

import jax

from safeicrl.agents.api import Agent
from safeicrl.envs.api import Env, Key, PyTree

# Every update reports these, unless the algorithm has its own list in an attribute `metrics`, with "env_steps" in
# it (Safe AD plays no episodes while it learns). `train` logs them by these names. It refuses an iteration in which
# one of them, or any metric with "loss" or "grad" in its name, is not finite. Other metrics may be nan.
# An algorithm that plays also reports "fault", from `trial.first_fault`. `train` undoes that iteration and raises.
METRICS = ("env_steps", "return", "cost", "budget", "over_budget", "lambda")


class Algorithm(Protocol):
    """One learning algorithm on one environment. Frozen: all that changes is in the train state.

    An algorithm with large arrays (a data set) is itself a pytree, an Equinox module: the arrays are then arguments
    of the compiled program and not constants in it.

    The train state is a pytree whose array leaves are everything that changes (parameters, optimiser,
    multiplier, normalisers, replay, step counters) and which has a field `key`. Its floating-point leaves are
    always finite: an iteration that breaks this is rolled back, except for its key and the fields named in the
    attribute `moves_on`, if there is one.
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
        means over episodes (several costs: of the sums); "over_budget" is the share of episodes over their budget;
        "fault" is what `trial.first_fault` says about the trials and the environment's spec.
        """
        ...

    def start_from(self, state: PyTree, other: PyTree) -> PyTree:
        """A new run's `state` with another run's networks; all else (multiplier, schedules) starts anew."""
        ...

    def agent(self, state: PyTree) -> Agent:
        """The policy of this state, frozen."""
        ...

    # Optional: `start_with(state, agent)`, a new run's `state` with a released policy; all else is new.
    # Optional: `row_axes`, the sizes of the axes that `update` divides among devices (devices.py) by the names of
    # their options. `run_trials` divides its rows. Without it, one seed trains on one device.

    def card(self) -> dict[str, Any]:
        """What rebuilds the agent around its arrays: "kind" (policies/catalogue.py) and what that kind needs."""
        ...
