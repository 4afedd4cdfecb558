"""Playing and learning at the same time: the next rows are played while the last ones are learned from.

With `overlap`, an iteration of SCARED learns from rows that the policy before the last update played. That is a
pure function of the train state, `Scared.update`. Here its two halves run side by side, with the same result: the
lanes (lanes.py) play on the host's cores, and the learner takes one minibatch after the other on the accelerator.

PPO's ratio stays right although the policy that played is older: the `log_prob` of an action is recorded when it is
chosen.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.agents.api import Agent
from safeicrl.algos.scared import Part, Scared, ScaredState, join
from safeicrl.envs.api import PyTree
from safeicrl.optimisers.ppo import PPO, PPOState, Work
from safeicrl.overlap.lanes import LanePrograms, Lanes, compile_all, is_array
from safeicrl.trial import Trials

Metrics = dict[str, jax.Array]
Judge = Callable[[ScaredState, ScaredState, Metrics], tuple[ScaredState, Metrics]]


class Overlapped:
    """One iteration of training per call, each on the state that the last call returned."""

    def __init__(self, algorithm: Scared, state: ScaredState, judge: Judge) -> None:
        """Compile everything; `state` gives the shapes, `judge` undoes an iteration that must not count."""
        config = algorithm.config
        assert isinstance(algorithm.optimiser, PPO)
        self.algorithm, self.ppo, self.judge = algorithm, algorithm.optimiser, judge
        shapes, self.static = eqx.partition(state, is_array)
        programs = LanePrograms(
            algorithm.env, eqx.filter_eval_shape(self._explorer, state), rows=config.rows // config.overlap,
            queue=config.queue, episodes=algorithm.episodes, steps=algorithm.steps, segments=config.segments,
        )  # fmt: skip
        self.lanes = Lanes(programs, config.overlap)
        self.under_way: tuple[PyTree, list[Future[Trials]]] | None = None
        self._compile(shapes, [programs.trials] * config.overlap)

    def _compile(self, state: PyTree, trials: list[Trials]) -> None:
        lower = lambda function, *given: jax.jit(function).lower(*given)  # noqa: E731
        tasks, _, _ = jax.eval_shape(self._rows, state, True)
        work, multiplier, metrics, sums = jax.eval_shape(self._begin, state, tasks, trials)
        self.minibatches = len(work.order)
        index = jax.ShapeDtypeStruct((), jnp.int32)
        self.programs = compile_all(
            {
                "rows": lower(self._rows, state, jax.ShapeDtypeStruct((), jnp.bool_)),
                "begin": lower(self._begin, state, tasks, trials),
                "minibatch": lower(self._minibatch, state.optimiser, sums, work, index),
                "end": lower(self._end, state, state.optimiser, multiplier, metrics, sums),
            }
        )

    def __call__(self, state: ScaredState) -> tuple[ScaredState, dict[str, np.ndarray]]:
        """Learn from this iteration's rows while the next are played; metrics are [1, 1, ...], [chunk, seed]."""
        called, busy = time.perf_counter(), self.lanes.busy.seconds
        arrays = eqx.filter(state, eqx.is_array)
        if self.under_way is None:
            self._start(*self.programs["rows"](arrays, np.bool_(False)))
        assert self.under_way is not None
        tasks, futures = self.under_way
        following = self.programs["rows"](arrays, np.bool_(True))
        trials = [future.result() for future in futures]
        self._start(*following)
        begun = time.perf_counter()
        state, metrics = self._learn(arrays, tasks, trials)
        played, now = self.lanes.busy.seconds - busy, time.perf_counter()
        host = {name: np.asarray(value)[None, None] for name, value in jax.device_get(metrics).items()}
        host["learner_idle"] = np.full((1, 1), 1 - (now - begun) / (now - called))
        host["collector_idle"] = np.full((1, 1), 1 - played / (now - called))
        return state, host

    def close(self) -> None:
        """Stop playing."""
        self.lanes.close()

    def _start(self, tasks: PyTree, parts: list[Part], agent: list[jax.Array]) -> None:
        self.under_way = (tasks, self.lanes.start(agent, parts))

    def _learn(self, arrays: PyTree, tasks: PyTree, trials: list[Trials]) -> tuple[ScaredState, Metrics]:
        run = self.programs
        work, multiplier, metrics, sums = run["begin"](arrays, tasks, trials)
        optimiser = arrays.optimiser
        for index in range(self.minibatches):
            optimiser, sums = run["minibatch"](optimiser, sums, work, np.int32(index))
            jax.block_until_ready(sums)  # only one in the accelerator's queue: the lanes' programs come in between
        new, metrics = jax.block_until_ready(run["end"](arrays, optimiser, multiplier, metrics, sums))
        return eqx.combine(new, self.static), metrics

    # -- programs --------------------------------------------------------------------------------------------

    def _explorer(self, state: ScaredState) -> Agent:
        return self.algorithm.explorer(state, self.algorithm.progress(state))

    def _rows(self, arrays: PyTree, ahead: jax.Array) -> tuple[PyTree, list[Part], list[jax.Array]]:
        """What is played for the iteration that starts from this state, or for the one after it (`ahead`).

        Tasks, parts and the agent's arrays. The next iteration's do not depend on what this one learns.
        """
        now: ScaredState = eqx.combine(arrays, self.static)
        after = self.algorithm.end(now, now.multiplier, now.optimiser)
        pick = lambda a, b: jnp.where(ahead, a, b) if eqx.is_array(a) else a  # noqa: E731
        state: ScaredState = jax.tree.map(pick, after, now)
        _, task_key, play_key, _ = self.algorithm.keys(state.key)
        tasks, budgets = self.algorithm.draw(task_key)
        agent = jax.tree.leaves(eqx.filter(self._explorer(state), eqx.is_array))
        return tasks, self.algorithm.parts(tasks, budgets, play_key), agent

    def _begin(
        self, arrays: PyTree, tasks: PyTree, trials: list[Trials]
    ) -> tuple[Work, jax.Array, Metrics, Metrics]:
        """The minibatches, the new λ, what to report about the trials, and zeros for the minibatches' sums."""
        algorithm, state, joined = self.algorithm, eqx.combine(arrays, self.static), join(trials)
        multiplier, metrics = algorithm.move(state, joined)
        _, _, _, key = algorithm.keys(state.key)
        work = self.ppo.begin(joined, tasks, algorithm.per_episode(multiplier), state.iteration, key)
        reported = jax.eval_shape(lambda: self.ppo.minibatch(state.optimiser, work, work.order[0])[1])
        return work, multiplier, metrics, {name: jnp.zeros(x.shape, x.dtype) for name, x in reported.items()}

    def _minibatch(self, optimiser: PyTree, sums: Metrics, work: Work, index: jax.Array) -> tuple[PyTree, Metrics]:
        state: PPOState = eqx.combine(optimiser, self.static.optimiser)
        state, metrics = self.ppo.minibatch(state, work, work.order[index])
        return eqx.filter(state, eqx.is_array), {name: sums[name] + metrics[name] for name in sums}

    def _end(
        self, arrays: PyTree, optimiser: PyTree, multiplier: jax.Array, metrics: Metrics, sums: Metrics
    ) -> tuple[PyTree, Metrics]:
        old: ScaredState = eqx.combine(arrays, self.static)
        means = {name: value / self.minibatches for name, value in sums.items()}
        learned, own = self.ppo.end(eqx.combine(optimiser, self.static.optimiser), means, old.iteration)
        new, judged = self.judge(old, self.algorithm.end(old, multiplier, learned), own | metrics)
        return eqx.filter(new, eqx.is_array), judged
