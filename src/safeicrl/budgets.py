"""What "over budget" means, and the budget bins of training and reports. One definition for all. No jax.

The functions take numpy arrays and JAX arrays: training calls them inside jit, and reports must not import jax.
"""

from typing import Any

import numpy as np

Array = Any  # numpy's or JAX's


def is_over(cost: Array, budget: Array) -> Array:
    """Whether an episode's cost is over its budget; the shapes broadcast.

    The slack is for real-valued costs, whose float32 sums depend on the order of their terms.
    """
    return cost > budget * (1 + 1e-6) + 1e-6


def budget_edges(low: float, high: float) -> np.ndarray:
    """The edges of five budget bins, [6]; the first bin is half as wide, since small budgets are the hardest.

    Reports show a policy's results in these bins. The multiplier and the training log use them too: λ then
    follows the worst bin of the report. (They used to have narrower bins at small budgets. Where costs are whole
    numbers, some of those held no budget at all.) For the paper's range 1–10: 1, 2, 4, 6, 8, 10.
    """
    return low + (high - low) * np.array([0, 1, 3, 5, 7, 9]) / 9


def bin_of(budget: Array, edges: Array) -> Array:
    """The number of each budget's bin, int; a lower edge belongs to its bin.

    The outer bins are open: every budget has a bin, also one that lies outside the range of the edges. A budget
    in no bin would be one whose violations nobody sees.
    """
    return (budget[..., None] >= edges[1:-1]).sum(-1)
