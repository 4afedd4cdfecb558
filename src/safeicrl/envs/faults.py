"""Numbers of an environment that break its contract: found inside the compiled program, raised on the host.

A cost of nan is never above any budget, and a negative one pays for others: both would count as safe. So every
place that plays an environment looks for such numbers. Compiled programs cannot raise. They return what
`find_fault` found, a few numbers, and the caller passes it to `refuse_fault` when the program has ended.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.errors import UserError, is_sound, rule_of

KINDS = ("cost", "reward", "observation", "first observation")
NONE = -1  # the kind of no fault
NO_FAULT = np.array([NONE, 0, 0, 0, 0], np.float32)  # what `find_fault` says about numbers that are all sound


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
) -> jax.Array:
    """The first number that is not sound, [5]: its kind (or `NONE`), row, episode, step and value.

    All arguments are [row, time]; several costs are [row, time, cost]. `observation` [row, time, obs] is what each
    step led to. `first` [row, time, obs] is what an episode began with where `start` is true. Where `valid` is
    false, nothing counts.
    """
    bad: list[jax.Array] = []
    values: list[jax.Array] = []

    def look(name: str, numbers: jax.Array, counts: jax.Array | bool) -> None:
        """Look for a fault along the last axis."""
        wrong = ~is_sound(name, numbers)
        which = jnp.argmax(wrong, axis=-1, keepdims=True)
        bad.append(wrong.any(-1) & counts)
        values.append(jnp.take_along_axis(numbers, which, axis=-1)[..., 0])

    if cost.ndim > reward.ndim:
        look("cost", cost, True)
    else:
        bad.append(~is_sound("cost", cost))
        values.append(cost)
    bad.append(~is_sound("reward", reward))
    values.append(reward)
    if jnp.issubdtype(observation.dtype, jnp.floating):
        for seen, counts in ((observation, True), (first, start)):
            look("observation", seen, counts)
    found = jnp.stack(bad) & valid  # [kind, row, time]
    at = jnp.unravel_index(jnp.argmax(found), found.shape)
    kind, row, _ = at
    value = jnp.stack([jnp.asarray(x, jnp.float32) for x in values])[at]
    place = (jnp.where(found.any(), kind, NONE), row, episode[at[1:]], time[at[1:]], value)
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in place])


def first_of(faults: jax.Array) -> jax.Array:
    """The first fault, [5], of what several calls of `find_fault` found, [..., 5]."""
    each = faults.reshape(-1, faults.shape[-1])
    return each[jnp.argmax(each[:, 0] != NONE)]


def refuse_fault(found: np.ndarray, env: str, where: Sequence[str] = ()) -> None:
    """Raise if `found`, the [5] of `find_fault`, is a fault of the environment called `env`.

    `where` says more about the place, such as "iteration 3".
    """
    kind, _, episode, step = (int(number) for number in found[:4])
    if kind == NONE:
        return
    name, value = KINDS[kind], float(found[4])
    places = [*where, f"episode {episode + 1}"] if episode >= 0 else list(where)
    if name == "first observation":
        name, places = "observation", [*places, "at the reset"]
    else:
        places.append(f"step {step + 1}")
    raise UserError(f"{env} gave {name} {value:g} ({', '.join(places)}): {rule_of(name)}")
