"""What "over budget" means, and the budget bins of training and reports. One definition for all. No jax.

The functions take numpy arrays and JAX arrays: training calls them inside jit, and reports must not import jax.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from safeicrl.errors import UserError, check_number, check_range

Array = Any  # numpy's or JAX's
Range = tuple[float, float]  # least and greatest budget
Ranges = Range | tuple[Range, ...]  # one for all costs, or one for each
ROUNDING = 1e-4  # of a sum of costs, in units
# Kept once an episode has cost something; or (amount, of budgets below) from the first step on, and perhaps a third
# number, what other budgets keep once an episode has cost something.
Reserve = float | tuple[float, float] | tuple[float, float, float]


def is_over(cost: Array, budget: Array, several: bool = False) -> Array:
    """Whether an episode's cost is over its budget; the shapes broadcast.

    With `several` costs the last axis is theirs, and it is reduced: any cost over its own budget counts.

    The slack is for real-valued costs, whose float32 sums depend on the order of their terms.
    """
    over = cost > budget * (1 + 1e-6) + 1e-6
    return over.any(-1) if several else over


def is_spent(left: Array, unit: float, several: bool = False) -> Array:
    """Whether nothing is `left` of a budget: less than one `unit` of cost, up to rounding; real-valued: nothing.

    With `several` costs the last axis is theirs, and it is reduced: any budget that is spent counts.
    """
    spent = left < (1 - ROUNDING) * unit if unit else left <= 0
    return spent.any(-1) if several else spent


def check_reserve(name: str, reserve: object) -> Reserve:
    """A reserve from what a user or a card gives: a number, one alone in a sequence, or two or three."""
    given = tuple(reserve) if isinstance(reserve, list | tuple) else (reserve,)
    if len(given) not in (1, 2, 3):
        raise UserError(
            f"{name} must be a number, or the amount, the budget below which, and perhaps the amount of other "
            f"budgets, got {reserve!r}"
        )
    amount = check_number(name, given[0], 0.0)
    if len(given) == 1:
        return amount
    below = check_number(f"{name}'s second number, the budget below which it is kept,", given[1], 0.0, strict=True)
    others = check_number(f"{name}'s third number, that of other budgets,", given[2], 0.0) if given[2:] else 0.0
    if not amount and not others:
        return 0.0
    return (amount, below, others) if others else (amount, below)


def reserve_parts(reserve: Reserve) -> tuple[float, float, float]:
    """Of budgets below the second number the first one, from the first step on; of others the third, later."""
    if not isinstance(reserve, tuple):
        return 0.0, -np.inf, reserve
    amount, below, *others = reserve
    return amount, below, others[0] if others else 0.0


def reserve_words(reserve: float | Sequence[float]) -> str:
    """A reserve in words, as results and cards hold it."""
    if isinstance(reserve, Sequence):
        amount, below, *others = reserve
        return f"reserve {amount:g} of budgets below {below:g}" + "".join(f", {x:g} of others" for x in others)
    return f"reserve {reserve:g}"


def beside(values: Array, costs: Array) -> Array:
    """Values per step or episode, with an axis of length 1 where `costs` has its cost axis: both then broadcast."""
    return values[..., None] if costs.ndim > values.ndim else values


def check_costs(names: object) -> None:
    """Raise unless `names` can name the costs of an environment."""
    words = names if isinstance(names, tuple) else ()
    if not words or not all(isinstance(name, str) and re.fullmatch(r"[\w-]+", name) for name in words):
        raise UserError(f"costs must be a tuple of names, each of letters, digits, _ and -, got {names!r}")
    if len(set(words)) < len(words):
        raise UserError(f"each cost needs a name of its own, got {', '.join(words)}")


def ranges_of(given: Any, costs: Sequence[str], name: str) -> tuple[Range, ...]:
    """A range of budgets for each cost, from one for all of them or one for each; refused if it is neither."""
    parts = list(given) if isinstance(given, tuple | list) else [given]
    if len(parts) == 2 and not any(isinstance(bound, tuple | list) for bound in parts):
        parts = [given] * len(costs)
    if len(parts) != len(costs):
        words = "one range, or one for each cost" if len(costs) > 1 else "one range"
        raise UserError(f"{name} must be {words} ({', '.join(costs)}), got {len(parts)}: {given!r}")
    for cost, part in zip(costs, parts, strict=True):
        if not isinstance(part, tuple | list):
            raise UserError(f"{name} of {cost} must be two numbers, got {part!r}")
    return tuple(check_range(f"{name} of {cost}", tuple(part)) for cost, part in zip(costs, parts, strict=True))


def check_ranges(given: Any, costs: tuple[str, ...], name: str) -> Ranges:
    """Return `given` as an `EnvSpec` takes it: one range for one cost, a range for each of several."""
    check_costs(costs)
    return check_range(name, given) if len(costs) == 1 else ranges_of(given, costs, name)


def budget_edges(low: Array, high: Array) -> np.ndarray:
    """The edges of five budget bins, [6]; the first bin is half as wide, since small budgets are the hardest.

    Arrays of bounds, [cost], give the bins of each cost, [cost, 6].

    Reports show a policy's results in these bins. The multiplier and the training log use them too: λ then
    follows the worst bin of the report. (They used to have narrower bins at small budgets. Where costs are whole
    numbers, some of those held no budget at all.) For the paper's range 1–10: 1, 2, 4, 6, 8, 10.
    """
    low, high = (np.asarray(bound, np.float64)[..., None] for bound in (low, high))
    return low + (high - low) * np.array([0, 1, 3, 5, 7, 9]) / 9


def bin_of(budget: Array, edges: Array) -> Array:
    """The number of each budget's bin, int; a lower edge belongs to its bin. `edges`: [bin + 1] or [cost, bin + 1].

    The outer bins are open: every budget has a bin, also one that lies outside the range of the edges. A budget
    in no bin would be one whose violations nobody sees.
    """
    return (budget[..., None] >= edges[..., 1:-1]).sum(-1)
