"""Numbers of an environment that break its contract: found inside the compiled program, raised on the host.

A cost of nan is never above any budget, and a negative one pays for others: both would count as safe. A guard
trusts in `spec.max_cost`, budgets are rounded to `spec.cost_unit`, and an episode that never ends never counts. So
every place that plays an environment looks for such numbers. Compiled programs cannot raise. They return what
`find_fault` found, a few numbers, and the caller passes it to `refuse_fault` when the program has ended.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs.api import EnvSpec
from safeicrl.envs.spaces import Grid
from safeicrl.errors import UserError, is_sound, rule_of

KINDS = ("cost", "reward", "observation", "first observation", "end")
NONE = -1  # the kind of no fault
NO_FAULT = np.array([NONE, 0, 0, 0, 0], np.float32)  # what `find_fault` says about numbers that are all sound
SLACK = 1e-4  # for rounding: of a unit, and of the largest cost


def keeps_promise(name: str, values: Any, spec: EnvSpec | None) -> Any:
    """Whether each number is sound and, with a `spec`, what it promises; `name` is cost, reward or observation.

    For numpy arrays and JAX arrays. The last axis of observations is theirs.
    """
    good = is_sound(name, values)
    if spec is not None and name == "cost":
        good &= values <= spec.max_cost * (1 + SLACK)
        if spec.cost_unit:
            units = values / spec.cost_unit
            good &= abs(units - units.round()) <= SLACK + 1e-6 * units  # a float32 has seven digits
    if spec is not None and name == "observation" and isinstance(spec.observation, Grid):
        good &= (values >= 0) & (values < np.array(spec.observation.sizes))
    return good


def broken_rule(name: str, value: float, spec: EnvSpec | None) -> str:
    """The rule that a number breaks, in words."""
    if spec is None or name == "reward" or not is_sound(name, value):
        return rule_of(name)
    if name == "cost" and value > spec.max_cost * (1 + SLACK):
        return f"costs must be at most {spec.max_cost:g}, the environment's spec.max_cost"
    if name == "cost":
        return f"costs must be multiples of {spec.cost_unit:g}, the environment's spec.cost_unit"
    assert isinstance(spec.observation, Grid)
    return f"observations must be cells in {spec.observation.limits}"


def find_fault(
    *,
    cost: jax.Array,
    reward: jax.Array,
    observation: jax.Array,
    first: jax.Array,
    start: jax.Array,
    valid: jax.Array,
    episode: jax.Array,
    time: jax.Array,
    spec: EnvSpec | None = None,
    age: jax.Array | None = None,
) -> jax.Array:
    """The first number that is not sound, [5]: its kind (or `NONE`), row, episode, step and value.

    With a `spec`, also one that is not what the environment promises there; and with `age`, the steps of an episode
    that has not ended (0 where one has), an episode that should have.

    All arguments are [row, time]; several costs are [row, time, cost]. `observation` [row, time, obs] is what each
    step led to. `first` [row, time, obs] is what an episode began with where `start` is true. Where `valid` is
    false, nothing counts.
    """
    bad: dict[str, jax.Array] = {}  # by kind, [row, time]
    values: dict[str, jax.Array] = {}

    def look(kind: str, numbers: jax.Array, counts: jax.Array | bool = True) -> None:
        """Look for a fault, along the last axis if there is one more."""
        wrong = ~keeps_promise(kind.split()[-1], numbers, spec)
        if numbers.ndim > reward.ndim:
            which = jnp.argmax(wrong, axis=-1, keepdims=True)
            wrong, numbers = wrong.any(-1), jnp.take_along_axis(numbers, which, axis=-1)[..., 0]
        bad[kind], values[kind] = wrong & counts, numbers

    look("cost", cost)
    look("reward", reward)
    if spec is not None or jnp.issubdtype(observation.dtype, jnp.floating):
        look("observation", observation)
        look("first observation", first, start)
    if spec is not None and age is not None:
        bad["end"] = age >= spec.max_steps
        values["end"] = jnp.full(age.shape, spec.max_steps)
    found = jnp.stack(list(bad.values())) & valid  # [kind, row, time]
    at = jnp.unravel_index(jnp.argmax(found), found.shape)
    value = jnp.stack([jnp.asarray(x, jnp.float32) for x in values.values()])[at]
    kind = jnp.array([KINDS.index(each) for each in bad])[at[0]]
    place = (jnp.where(found.any(), kind, NONE), at[1], episode[at[1:]], time[at[1:]], value)
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in place])


def first_of(faults: jax.Array) -> jax.Array:
    """The first fault, [5], of what several calls of `find_fault` found, [..., 5]."""
    each = faults.reshape(-1, faults.shape[-1])
    return each[jnp.argmax(each[:, 0] != NONE)]


def refuse_fault(found: np.ndarray, env: str, where: Sequence[str] = (), spec: EnvSpec | None = None) -> None:
    """Raise if `found`, the [5] of `find_fault`, is a fault of the environment called `env`.

    `where` says more about the place, such as "iteration 3". `spec` is what `find_fault` was given.
    """
    kind, _, episode, step = (int(number) for number in found[:4])
    if kind == NONE:
        return
    name, value = KINDS[kind], float(found[4])
    places = [*where, f"episode {episode + 1}"] if episode >= 0 else list(where)
    if name == "end":
        place = f" ({', '.join(places)})" if places else ""
        raise UserError(f"{env} did not end an episode within its spec.max_steps of {value:g}{place}")
    if name == "first observation":
        name, places = "observation", [*places, "at the reset"]
    else:
        places.append(f"step {step + 1}")
    raise UserError(f"{env} gave {name} {value:g} ({', '.join(places)}): {broken_rule(name, value, spec)}")
