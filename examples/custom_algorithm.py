"""A custom algorithm: PPO in context without a constraint; safeicrl train --import FILE --algo plain-ppo."""

from dataclasses import asdict, dataclass, field

import jax.numpy as jnp
from jax import Array, random

from safeicrl.algos.registry import Entry, register
from safeicrl.algos.scared import summary
from safeicrl.envs.api import record, replace
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ppo import PPO, PPOConfig, PPOState
from safeicrl.penalty import PenaltyConfig
from safeicrl.trial import episode_sums, first_fault, run_trials, sample_queue


@dataclass(frozen=True)
class PlainConfig:  # its settings: --algo.rows, --algo.net.width, ...
    iterations: int = 200
    rows: int = 128
    net: NetConfig = field(default_factory=NetConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)


@record
class PlainState:  # everything that changes in training
    optimiser: PPOState
    iteration: Array
    key: Array


class PlainPPO:
    def __init__(self, env, config):
        self.env, self.config = env, config
        self.ppo = PPO(env, config.net, PenaltyConfig(), config.ppo, config.iterations, config.rows)

    def init(self, key):
        return PlainState(optimiser=self.ppo.init(key), iteration=jnp.int32(0), key=random.fold_in(key, 1))

    def update(self, state):
        env, spec, free = self.env, self.env.spec, jnp.zeros(self.env.spec.episodes)  # cost has no price
        agent, (key, draw, play, learn) = self.agent(state), random.split(state.key, 4)
        tasks, budgets = sample_queue(env, "train", spec.train_budget, (self.config.rows, 1), draw)
        trials = run_trials(env, agent, tasks, budgets, play, episodes=spec.episodes, steps=spec.trial_steps)
        ppo, metrics = self.ppo.update(state.optimiser, trials, tasks, free, state.iteration, learn)
        metrics |= {"lambda": free[0], "env_steps": trials.valid.sum(), "fault": first_fault(trials, spec)}
        metrics |= summary(episode_sums(trials, spec.episodes))
        return PlainState(optimiser=ppo, iteration=state.iteration + 1, key=key), metrics

    def start_from(self, state, other):
        return replace(state, optimiser=self.ppo.start_from(state.optimiser, other.optimiser))

    def agent(self, state):
        return replace(self.ppo.agent(state.optimiser), trained_episodes=self.env.spec.episodes)

    def card(self):  # what rebuilds a policy around its arrays
        return {"kind": "net", "net": asdict(self.config.net)}


register("plain-ppo", Entry(algorithm=f"{__name__}:PlainPPO", config=f"{__name__}:PlainConfig"))
