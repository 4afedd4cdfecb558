"""The constraint's machinery: numbers worked by hand, random trials, and Theorem 1 on a solved problem."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import random_rows

from safeicrl import penalty
from safeicrl.errors import UserError
from safeicrl.penalty import PenaltyConfig
from safeicrl.trial import Episodes


def episodes(costs, budgets, played=None, returns=None) -> Episodes:
    """A record of [trial, episode] lists; without `played` every episode was."""
    array = functools.partial(np.asarray, dtype=np.float32)
    shape = np.shape(costs)
    return Episodes(
        returns=array(np.zeros(shape) if returns is None else returns),
        costs=array(costs),
        lengths=array(np.ones(shape)),
        budgets=array(budgets),
        played=np.ones(shape, bool) if played is None else np.array(played),
    )


# Each in one program instead of one for each operation.
constraint, surrogate, mean_of_max, max_of_means, hinge_by_bin, over_by_bin, in_bins = map(
    jax.jit,
    (
        penalty.constraint, penalty.surrogate, penalty.mean_of_max, penalty.max_of_means, penalty.hinge_by_bin,
        penalty.over_by_bin, penalty.in_bins,
    ),
)  # fmt: skip
update_multiplier = jax.jit(penalty.update_multiplier, static_argnums=3)


# One bin below budget 3, one from 3 on.
EDGES = np.array([1.0, 3.0, 5.0], np.float32)
# Four trials of three episodes; the last trial was cut after its first.
PLAYED = episodes(
    costs=[[3.0, 1.0, 0.0], [1.0, 2.0, 2.0], [9.0, 5.0, 0.0], [4.0, 0.0, 0.0]],
    budgets=[[1.0] * 3, [2.0] * 3, [5.0] * 3, [3.0, 0.0, 0.0]],
    played=[[True] * 3, [True] * 3, [True] * 3, [True, False, False]],
    returns=[[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 6.0], [5.0, 99.0, 99.0]],
)
NOBODY = dataclasses.replace(PLAYED, played=np.zeros((4, 3), bool))
# Excess:  [[2, 0, −1], [−1, 0, 0], [4, 0, −5], [1, ·, ·]]


def test_hinge():
    np.testing.assert_array_equal(penalty.hinge(np.array([-2.0, 0.0, 3.0])), [0, 0, 3])


def test_constraint_is_the_mean_excess_of_each_episode():
    np.testing.assert_allclose(constraint(PLAYED), [(2 - 1 + 4 + 1) / 4, 0, (-1 + 0 - 5) / 3])


def test_surrogate_charges_episodes_over_budget_and_credits_none_below():
    found = surrogate(PLAYED, np.float32(0.5))
    assert found == pytest.approx((2 + 2 + 4) - 0.5 * 1.5)


def test_max_of_means_looks_at_every_episode_and_every_budget():
    # below 3: episodes [½, 0, −½]; from 3 on: [5/2, 0, −5]
    assert max_of_means(PLAYED, EDGES) == pytest.approx(2.5)
    # in one bin the violation at the small budget is hidden by slack at the large one
    mixed = episodes(costs=[[3.0], [0.0]], budgets=[[1.0], [5.0]])
    assert max_of_means(mixed, np.array([1.0, 5.0])) == pytest.approx(-1.5)
    assert max_of_means(mixed, EDGES) == pytest.approx(2.0)


def test_mean_of_max():
    assert mean_of_max(PLAYED) == pytest.approx((2 + 0 + 4 + 1) / 4)
    unplayed = dataclasses.replace(PLAYED, played=PLAYED.played & (np.arange(4) != 2)[:, None])
    assert mean_of_max(unplayed) == pytest.approx((2 + 0 + 1) / 3)


def test_by_bin():
    np.testing.assert_allclose(hinge_by_bin(PLAYED, EDGES), [2 / 6, (4 + 1) / 4])
    np.testing.assert_allclose(over_by_bin(PLAYED, EDGES), [1 / 6, 2 / 4])
    np.testing.assert_array_equal(np.asarray(hinge_by_bin(PLAYED, np.array([0.0, 0.5, 9.0])))[0], 0)


def test_a_sum_that_rounding_took_over_the_budget_is_not_over_it():
    rounded = episodes(costs=[[np.nextafter(np.float32(0.3), np.float32(1)), 0.3001]], budgets=[[0.3, 0.3]])
    assert rounded.costs[0, 0] > rounded.budgets[0, 0]
    np.testing.assert_allclose(over_by_bin(rounded, np.array([0.0, 1.0])), [0.5])


def test_every_budget_is_in_exactly_one_bin():
    budgets = np.array([0.0, 0.999, 1.0, 2.9, 3.0, 5.0, 5.001])
    expected = [[1, 0], [1, 0], [1, 0], [1, 0], [0, 1], [0, 1], [0, 1]]
    np.testing.assert_array_equal(in_bins(budgets, EDGES), expected)
    same = in_bins(np.array([2.0, 1.9999999]), np.array([2.0, 2.0, 2.0]))
    np.testing.assert_array_equal(np.sum(same, -1), 1)


@pytest.mark.parametrize(
    ("change", "signal"),
    [
        ({"signal": "hinge", "tolerance": 0.25}, 1.25 - 0.25),
        ({"signal": "max_of_means"}, 2.5),
        ({"signal": "mean_of_max"}, 1.75),
        ({"dual": "naive"}, np.array([2.5, 0.0, -0.5])),  # of each episode, the worse of two bins
    ],
)
def test_one_step_of_the_multiplier(change, signal):
    config = PenaltyConfig(step=0.1, bound=100.0, **change)
    start = np.full(np.shape(signal), 1.0, np.float32)
    found = update_multiplier(start, PLAYED, EDGES, config)
    np.testing.assert_allclose(found, 1 + 0.1 * signal, rtol=1e-6)


def test_the_multipliers_step_moves_over_the_run():
    """From 0.1 to 0.5: 0.3 half-way; the signal is 2.5."""
    config = PenaltyConfig(signal="max_of_means", step=0.1, final_step=0.5, bound=100.0)
    moved = [update_multiplier(np.float32(1.0), PLAYED, EDGES, config, p) for p in (0.0, 0.5, 1.0)]
    np.testing.assert_allclose(moved, [1 + 2.5 * 0.1, 1 + 2.5 * 0.3, 1 + 2.5 * 0.5], rtol=1e-6)


def test_the_multiplier_is_projected_capped_and_moves_by_bounded_steps():
    move = lambda start, **change: np.asarray(  # noqa: E731
        update_multiplier(np.array(start, np.float32), PLAYED, EDGES, PenaltyConfig(dual="naive", **change))
    ).tolist()
    assert move([0.0, 0.0, 0.1], step=1.0, bound=100.0) == [2.5, 0.0, 0.0]
    assert move([0.0, 0.0, 5.0], step=1.0, bound=0.5) == [0.5, 0.0, 4.5]
    assert move([0.0, 0.0, 5.0], step=1.0, bound=100.0, cap=1.0) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "change", [{"signal": "hinge"}, {"signal": "max_of_means"}, {"signal": "mean_of_max"}, {"dual": "naive"}]
)
def test_no_finished_episode_no_signal(change):
    start = np.ones(3, np.float32) if "dual" in change else np.float32(1.0)
    found = update_multiplier(start, NOBODY, EDGES, PenaltyConfig(**change))
    np.testing.assert_array_equal(found, start)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"form": "papr"}, "penalty.form must be one of excess, paper, got 'papr'"),
        ({"source": "rows"}, "penalty.source must be one of rollout, replay, got 'rows'"),
        ({"final_step": -1.0}, "penalty.final_step must be a finite number ≥ 0.0, got -1.0"),
        ({"dual": "none"}, "penalty.dual must be one of exact, naive, got 'none'"),
        ({"signal": "max"}, "penalty.signal must be one of hinge, max_of_means, mean_of_max, got 'max'"),
        ({"step": -0.1}, "penalty.step must be a finite number ≥ 0.0, got -0.1"),
        ({"tolerance": float("nan")}, "penalty.tolerance must be a finite number ≥ 0.0, got nan"),
        ({"bound": 0.0}, "penalty.bound must be a finite number > 0.0, got 0.0"),
        ({"initial": 60.0}, "penalty.cap must be ≥ penalty.initial, got 50.0 < 60.0"),
    ],
)
def test_impossible_settings(change, words):
    with pytest.raises(UserError) as error:
        PenaltyConfig(**change)
    assert str(error.value) == words


# -- step by step, on random trials in packed rows


@pytest.fixture(scope="module")
def played():
    """Random trials, what the penalty makes of them, and their episodes found by a plain loop."""
    trials = random_rows()
    derived = jax.jit(lambda t: (penalty.excess_cost(t), penalty.over_budget(t)))(trials)
    trials, derived = jax.tree.map(np.asarray, (trials, derived))
    return trials, derived, list(episodes_of(trials))


def episodes_of(trials):
    """(row, trial, episode, steps, finished) of everything played, by walking along each row."""
    for row, valid in enumerate(trials.valid):
        steps: list[int] = []
        for t in np.flatnonzero(valid):
            steps.append(int(t))
            ended = bool(trials.terminated[row, t] or trials.truncated[row, t])
            if ended or t == np.flatnonzero(valid)[-1]:
                yield row, int(trials.trial[row, t]), int(trials.token.episode[row, t]), steps, ended
                steps = []


def test_random_play_has_all_kinds_of_episodes(played):
    trials, _, episodes = played
    finished = [e for e in episodes if e[-1]]
    costs = np.array([trials.cost[row, steps].sum() for row, _, _, steps, _ in finished])
    budgets = np.array([trials.token.ctg[row, steps[0]] for row, _, _, steps, _ in finished])
    assert (costs > budgets).any()
    assert (costs == budgets).any()
    assert (costs < budgets).any()
    assert len(finished) < len(episodes)  # some rows were cut


def test_excess_cost_sums_to_the_hinge_of_every_episode(played):
    trials, (excess, _), episodes = played
    for row, _, _, steps, _ in episodes:
        budget = trials.token.ctg[row, steps[0]]
        assert excess[row, steps].sum() == max(trials.cost[row, steps].sum() - budget, 0)
        assert (excess[row, steps] >= 0).all()
        assert (excess[row, steps] <= trials.cost[row, steps]).all()


def test_a_price_is_paid_for_cost_within_the_budget_only(played):
    trials, _, episodes = played
    reward = jax.jit(penalty.net_reward, static_argnums=1)
    net = np.asarray(reward(trials, PenaltyConfig(price=0.5)))
    np.testing.assert_array_equal(reward(trials, PenaltyConfig()), trials.reward)
    for row, _, _, steps, _ in episodes:
        within = min(trials.cost[row, steps].sum(), trials.token.ctg[row, steps[0]])
        assert (trials.reward - net)[row, steps].sum() == pytest.approx(0.5 * within)


def test_over_budget_marks_whole_episodes(played):
    trials, (_, over), episodes = played
    for row, _, _, steps, _ in episodes:
        delta = trials.token.ctg[row, steps[0]]
        assert (over[row, steps] == (trials.cost[row, steps].sum() > delta)).all()


# -- Theorem 1


@dataclasses.dataclass(frozen=True)
class Plans:
    """A trial of two episodes and a policy that chooses one of three plans for it at random.

    A policy is the vector of the plans' probabilities, so its expected return and costs are linear in it.
    With budget 1 the problem  max 3 p₁ + 4 p₂  s.t.  4 p₁ + 2 p₂ ≤ 1,  4 p₂ ≤ 1  has its optimum where both
    constraints bind: p₂ = ¼, p₁ = ⅛, return 1.375. Its multipliers make both plans worth nothing on balance:
    3 = 4 λ₁ and 4 = 2 λ₁ + 4 λ₂, that is λ* = (¾, ⅝).
    """

    returns: tuple[float, ...] = (0.0, 3.0, 4.0)  # [plan]
    costs: tuple[tuple[float, float], ...] = ((0.0, 0.0), (4.0, 0.0), (2.0, 4.0))  # [plan, episode]
    budget: float = 1.0
    optimum: tuple[float, ...] = (0.625, 0.125, 0.25)
    value: float = 1.375
    multipliers: tuple[float, float] = (0.75, 0.625)

    def play(self, policy: jax.Array) -> Episodes:
        """Returns and costs whose means are the policy's expectations: one trial with just these."""
        gain = policy @ jnp.array(self.returns)
        costs = (policy @ jnp.array(self.costs))[None]
        return Episodes(
            returns=jnp.array([[gain, 0.0]]),  # all of it in the first episode: only the sum counts
            costs=costs,
            lengths=jnp.ones_like(costs),
            budgets=jnp.full_like(costs, self.budget),
            played=jnp.ones(costs.shape, bool),
        )

    def surrogate(self, policy: jax.Array, multiplier: jax.Array) -> jax.Array:
        return penalty.surrogate(self.play(policy), multiplier)

    def best(self, multiplier: jax.Array) -> jax.Array:
        """argmax_π L_Σ(π, λ). L_Σ is piecewise linear and all its corners lie on the grid, so this is exact."""
        values = jax.vmap(self.surrogate, (0, None))(GRID, multiplier)
        return jnp.asarray(GRID)[jnp.argmax(values)]

    def lagrangian_best(self, multipliers: jax.Array) -> jax.Array:
        """argmax_π L(π, λ) of the ordinary dual; linear, so one of the plans is best."""
        worth = jnp.array(self.returns) - jnp.array(self.costs) @ multipliers
        return jax.nn.one_hot(jnp.argmax(worth), 3)

    def iterate(self, start: jax.Array, config: PenaltyConfig, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Eq. 6 from λ₀; all policies and multipliers on the way."""
        return jax.tree.map(np.asarray, self.program(config, steps)(start))

    @functools.cache  # noqa: B019  two problems, and every start shares a program
    def program(self, config: PenaltyConfig, steps: int) -> Callable[[jax.Array], tuple]:
        choose = self.best if config.dual == "exact" else self.lagrangian_best

        def step(multiplier: jax.Array, _: None) -> tuple:
            policy = choose(multiplier)
            edges = jnp.array([self.budget, self.budget])
            multiplier = penalty.update_multiplier(multiplier, self.play(policy), edges, config)
            return multiplier, (policy, multiplier)

        return jax.jit(lambda start: jax.lax.scan(step, start, length=steps)[1])


# policies in eighths, [45, 3]
GRID = np.array([(8 - i - j, i, j) for i in range(9) for j in range(9 - i)], np.float32) / 8
TIGHT = Plans()
# A budget that no plan breaks: the best plan is optimal and no multiplier is needed.
LOOSE = Plans(budget=5.0, optimum=(0.0, 0.0, 1.0), value=4.0, multipliers=(0.0, 0.0))
EQ_6 = PenaltyConfig(signal="max_of_means", step=0.05, bound=100.0, cap=100.0)


@pytest.mark.parametrize("problem", [TIGHT, LOOSE], ids=["tight", "loose"])
def test_the_problem_is_solved(problem):
    """Duality by hand: the optimum is feasible, and no plan is worth more than it at the multipliers."""
    policy, costs, gains = (np.array(x) for x in (problem.optimum, problem.costs, problem.returns))
    assert (policy @ costs <= problem.budget).all()
    assert policy @ gains == problem.value
    slack = problem.budget - policy @ costs
    assert (slack * problem.multipliers == 0).all()
    bound = (gains - (costs - problem.budget) @ np.array(problem.multipliers)).max()
    assert bound == problem.value


@pytest.mark.parametrize("problem", [TIGHT, LOOSE], ids=["tight", "loose"])
@pytest.mark.parametrize("start", [0.0, 0.1, 0.7, 0.8, 5.0])
def test_theorem_1_from_anywhere_the_iteration_settles_at_the_optimum(problem, start):
    policies, multipliers = problem.iterate(np.float32(start), EQ_6, 200)
    np.testing.assert_allclose(policies[-50:], np.tile(problem.optimum, (50, 1)))
    np.testing.assert_allclose(multipliers[-50:], multipliers[-1])
    if problem is TIGHT:  # the multiplier stops as soon as it is large enough, and never comes down from above
        assert multipliers[-1] >= max(problem.multipliers)
        assert multipliers[-1] == pytest.approx(max(start, multipliers[-1]))
        assert (np.diff(multipliers) >= 0).all()
    else:  # there is slack, which takes it back to nothing
        assert multipliers[-1] == 0


@pytest.mark.parametrize("multiplier", [0.7501, 1.0, 3.0, 50.0])
def test_theorem_1_any_multiplier_above_the_largest_is_a_fixed_point(multiplier):
    [policy], [after] = TIGHT.iterate(np.float32(multiplier), EQ_6, 1)
    np.testing.assert_array_equal(policy, TIGHT.optimum)
    assert after == np.float32(multiplier)


def test_theorem_1_at_the_largest_multiplier_itself_the_optimum_is_a_maximiser():
    """‖λ*‖∞ exactly: others tie with it, none beats it."""
    best = np.float32(max(TIGHT.multipliers))
    values = np.asarray(jax.jit(jax.vmap(TIGHT.surrogate, (0, None)))(GRID, best))
    assert values.max() == pytest.approx(TIGHT.value)
    [own] = values[(TIGHT.optimum == GRID).all(-1)]
    assert own == pytest.approx(TIGHT.value)


@pytest.mark.parametrize("multiplier", [0.0, 0.3, 0.65, 0.7499])
def test_theorem_1_a_smaller_multiplier_is_no_fixed_point(multiplier):
    """Not even between the two episodes' multipliers: breaking the first constraint still pays."""
    [policy], [after] = TIGHT.iterate(np.float32(multiplier), EQ_6, 1)
    worst = np.max(policy @ np.array(TIGHT.costs) - TIGHT.budget)
    assert worst > 0
    assert policy @ np.array(TIGHT.returns) > TIGHT.value
    assert after == pytest.approx(multiplier + EQ_6.step * worst)


def test_one_multiplier_per_episode_reaches_the_optimum_on_average_only():
    """The naive dual: λ closes in on λ*, but each of its policies is a single plan; their average is optimal."""
    config = dataclasses.replace(EQ_6, dual="naive", step=0.002)
    policies, multipliers = TIGHT.iterate(np.zeros(2, np.float32), config, 20_000)
    late = slice(10_000, None)
    np.testing.assert_allclose(multipliers[late].mean(0), TIGHT.multipliers, atol=0.01)
    np.testing.assert_allclose(policies[late].mean(0), TIGHT.optimum, atol=0.01)
    assert set(np.unique(policies)) == {0, 1}
