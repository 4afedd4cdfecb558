"""Learning histories on the device: every step labelled with its return and cost to go, cut into windows.

A window never crosses two histories. If histories are long, a window of every `stride`-th episode spans more
learning progress. No episode is lost: a history becomes `stride` strands, and each episode is in one of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs.api import EnvSpec, Key, record
from safeicrl.envs.spaces import Box
from safeicrl.errors import UserError, check_sound
from safeicrl.nets.decision_transformer import Scales, Steps


@record
class Windows:
    """Every step of every history in one row, and where windows may begin in it."""

    steps: Steps  # [step, ...]
    starts: jax.Array  # [start] int32, the histories in random order
    count: jax.Array  # [] int32: only the first `count` starts are used

    def sample(self, key: Key, batch: int, length: int) -> Steps:
        """Random windows, [batch, length]."""
        start = self.starts[jax.random.randint(key, (batch,), 0, self.count)]
        index = start[:, None] + jnp.arange(length)
        return jax.tree.map(lambda x: x[index], self.steps)


def to_go(values: np.ndarray, done: np.ndarray) -> np.ndarray:
    """Sum of `values` from each step to its episode's end, the step itself included; [step], whole episodes."""
    total = np.cumsum(values, dtype=np.float64)
    ends = np.flatnonzero(done)
    end = ends[np.searchsorted(ends, np.arange(len(values)))]  # of each step's episode
    return (total[end] - total + values).astype(np.float32)


def make_windows(histories: Any, length: int, *, stride: int = 1, share: float = 1.0, seed: int = 0) -> Windows:
    """All windows of `length` steps of a `share` of the `histories` (a `Histories`, or arrays like its own).

    The share is of whole histories, chosen by `seed`. It changes only `count`, so all shares use one program.
    """
    parts: list[Steps] = []
    starts: list[np.ndarray] = []  # of each history
    begin = longest = 0
    for index in range(len(histories.done)):
        part, sizes = _strands(histories, index, stride)
        first = begin + np.cumsum(sizes) - sizes  # of each strand
        own = [np.arange(at, at + size - length + 1) for at, size in zip(first, sizes, strict=True)]
        starts.append(np.concatenate(own))
        parts.append(part)
        begin, longest = begin + sizes.sum(), max(longest, *sizes)
    if not sum(len(own) for own in starts):
        every = f" with every {stride}th episode" if stride > 1 else ""
        raise UserError(f"a window of {length} steps is longer than the longest history{every}: {longest} steps")
    shuffled = [starts[i].astype(np.int32) for i in np.random.default_rng(seed).permutation(len(starts))]
    used = sum(len(own) for own in shuffled[: max(1, round(share * len(shuffled)))])
    if used == 0:
        raise UserError(f"a share of {share:g} of the histories holds no window of {length} steps")
    joined = jax.tree.map(lambda *x: jnp.asarray(np.concatenate(x)), *parts)
    return Windows(steps=joined, starts=jnp.asarray(np.concatenate(shuffled)), count=jnp.int32(used))


def _strands(histories: Any, index: int, stride: int) -> tuple[Steps, np.ndarray]:
    """One history as strands of every `stride`-th episode, one after another, and their sizes, [stride].

    An unfinished last episode is left out: its return and cost are unknown.
    """
    ends = np.flatnonzero(histories.done[index])
    whole = ends[-1] + 1 if len(ends) else 0
    first = np.concatenate([[0], ends + 1])  # [episode]
    episode = np.searchsorted(ends, np.arange(whole))  # [step]
    done, reward, cost = (np.asarray(x[index][:whole]) for x in (histories.done, histories.reward, histories.cost))
    arrays: dict[str, Any] = {
        "observation": np.asarray(histories.observation[index][:whole]),
        "action": np.asarray(histories.action[index][:whole]),
        "reward": reward,
        "cost": cost,
        "rtg": to_go(reward, done),
        "ctg": to_go(cost, done),
        "time": (np.arange(whole) - first[episode]).astype(np.int16),
    }
    for name in ("observation", "reward", "cost"):
        try:
            check_sound(name, arrays[name])
        except UserError as error:
            raise UserError(f"history {index} of {getattr(histories, 'folder', 'the data')}: {error}") from None
    order = np.argsort(episode % stride, kind="stable")
    steps = Steps(**{name: array[order] for name, array in arrays.items()})
    return steps, np.bincount(episode % stride, minlength=stride)


def measure_scales(windows: Windows, spec: EnvSpec) -> Scales:
    """How large the numbers in the data are."""
    steps = windows.steps
    observation = steps.observation.astype(jnp.float32)
    real = isinstance(spec.observation, Box)
    first = steps.time == 0
    ends = [
        jnp.stack([jnp.where(first, x, jnp.inf).min(), jnp.where(first, x, -jnp.inf).max()])
        for x in (steps.rtg, steps.ctg)
    ]
    greatest = [jnp.abs(x.astype(jnp.float32)).max() for x in (steps.reward, steps.cost)]
    return Scales(
        mean=observation.mean(0) if real else jnp.zeros(observation.shape[1]),
        deviation=jnp.maximum(observation.std(0), 1e-3) if real else jnp.ones(observation.shape[1]),
        step=jnp.maximum(jnp.stack(greatest), 1e-6),
        returns=ends[0],
        costs=ends[1],
    )
