"""The policy network as an agent: sampled, tempered or greedy, with its guard on or off."""

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.agents.brake import braked
from safeicrl.agents.reserved import Reserved, told
from safeicrl.agents.settled import SPARE, Settled, settled, take_back
from safeicrl.budgets import Reserve
from safeicrl.envs.api import Key, PyTree, replace
from safeicrl.nets.guard import Verdict, tolerated
from safeicrl.nets.heads import Categorical, Distribution, Levels, PolicyNet, TanhNormal
from safeicrl.nets.transformer import Cache
from safeicrl.tokens import Token

Memory = Cache | Settled | Reserved
CANDIDATES = 8  # real-valued actions that the guard may choose from instead of the policy's own


class InContextAgent(eqx.Module):
    """Acts by the network on everything it has seen in the trial."""

    net: PolicyNet
    epsilon: jax.Array | None = None  # [] exploration added while training off-policy
    risk: jax.Array | float | None = None  # the guard's threshold; None: no guard
    temperature: float = eqx.field(static=True, default=1.0)  # 0: greedy
    reserve: Reserve = eqx.field(static=True, default=0.0)  # of the budget, see reserved.py
    brake: float = eqx.field(static=True, default=1.0)  # of the action after a cost that leaves nothing, brake.py
    trained_episodes: int | None = eqx.field(static=True, default=None)  # K; None: no limit, see `read`
    settles: bool = eqx.field(static=True, default=False)  # its memory lasts, see settled.py
    settle_after: int | None = eqx.field(static=True, default=None)  # if it does, after so many episodes; None: K
    bold: tuple[float, float] | None = eqx.field(static=True, default=None)  # in training: see `bold_rows`

    def init(self, tasks: PyTree, rows: int) -> Memory:
        """An empty context."""
        trunk = self.net.trunk
        cache, costs = self.net.init_cache(rows, 0, own_clocks=self.settles), trunk.spec.cost_shape
        memory = settled(cache, costs) if self.settles else cache
        return Reserved(memory=memory, budget=jnp.zeros((rows, *costs))) if self.reserve else memory

    def extend(self, memory: Memory, steps: int) -> Memory:
        """Room for `steps` tokens, at most the network's context; a settled memory has some to spare."""
        if isinstance(memory, Reserved):
            return replace(memory, memory=self.extend(memory.memory, steps))
        if isinstance(memory, Settled):
            return replace(memory, cache=self.net.trunk.extend_cache(memory.cache, steps, self.spare))
        return self.net.trunk.extend_cache(memory, steps)

    @property
    def last(self) -> int | None:
        """Index of the last episode that adds to its memory; None: every one does."""
        if self.trained_episodes is None:
            return None
        return (self.settle_after if self.settles and self.settle_after else self.trained_episodes) - 1

    @property
    def spare(self) -> int:
        """How many tokens a settled memory has room for, beside those of training's trials.

        0 if these were longer than the context: then the policy has learned to do without the oldest tokens.
        """
        if not self.settles or self.trained_episodes is None:
            return 0
        trunk = self.net.trunk
        longest = self.trained_episodes * trunk.spec.max_steps
        return SPARE * trunk.spec.max_steps if longest <= trunk.config.context else 0

    def act(self, memory: Memory, token: Token, key: Key) -> tuple[Memory, jax.Array, PyTree]:
        """Read the tokens, choose the actions; also returns what a learner or a user wants to know of the choice.

        That is the log-probability under the policy acted by and, with a guard, what the guard said and did.
        """
        memory, seen, watched = self.read(memory, token)
        policy = self.net.distribution(seen)
        if self.temperature not in (0, 1):
            policy = policy.tempered(self.temperature)
        policy = policy if self.epsilon is None else policy.explored(self.epsilon)
        guard, risk = self.net.guard, self.risk
        if self.bold is not None and risk is not None:
            share, boldest = self.bold
            risk = jnp.where(bold_rows(len(token.time), share), boldest, risk)[:, None]
        if guard is None or risk is None:
            action = self._choose(policy, token, key)
            return memory, action, {"log_prob": policy.log_prob(action)}
        if isinstance(policy, TanhNormal):
            candidates = self._candidates(policy, token, key)  # [row, candidate, action]
            scaled = self.net.trunk.spec.action.encode_scaled(candidates)
            risks = guard.rate(watched, scaled, token.ctg, token.time)
            return memory, *self._first_tolerable(policy, candidates, risks, risk)
        return memory, *self._allowed(policy, guard.judge(watched, token.ctg, token.time, risk), key)

    def read(self, memory: Memory, token: Token) -> tuple[Memory, jax.Array, jax.Array]:
        """What the policy's head reads of the newest token of each row, and what its guard reads.

        The network knows the indices of `trained_episodes` episodes, and goes wrong on larger ones. Every later
        episode has the index of the `last` one, so a trial can go on for as long as the user likes.
        """
        if isinstance(memory, Reserved):
            budget, left = told(memory, token, self.reserve)
            inner, seen, watched = self._read(memory.memory, token, replace(token, ctg=left))
            return replace(memory, memory=inner, budget=budget), seen, watched
        return self._read(memory, token, token)

    def _read(self, memory: Cache | Settled, token: Token, known: Token) -> tuple[Memory, jax.Array, jax.Array]:
        """The same; the network reads `known` in place of the token."""
        if self.last is not None:
            known = replace(known, episode=jnp.minimum(token.episode, self.last))
        trunk = self.net.trunk
        # not `known.first`: after single episodes of training, every start would count as a new trial
        if not isinstance(memory, Settled):
            return self.net.step(memory, known, token.first)
        assert self.last is not None
        memory = take_back(memory, token, last=self.last, max_steps=trunk.spec.max_steps)
        cache, seen, watched = self.net.step(memory.cache, known, token.first)
        return replace(memory, cache=cache), seen, watched

    def _choose(self, policy: Distribution, token: Token, key: Key) -> jax.Array:
        action = policy.mode() if self.temperature == 0 else policy.sample(key)
        return action if self.brake == 1 else braked(action, token, self.brake, self.net.trunk.spec)

    def _allowed(self, policy: Categorical | Levels, verdict: Verdict, key: Key) -> tuple[jax.Array, PyTree]:
        """The policy's action if the guard allows it, else another one: the policy restricted to what is allowed.

        Both are drawn with the same noise. So the restricted draw is the policy's own, if that is allowed.
        """
        safe, free = policy.restricted(verdict.allowed), policy.restricted(jnp.array(True))
        drawn = free if self.temperature == 0 else free.perturbed(key)
        proposal, action = drawn.mode(), drawn.restricted(verdict.allowed).mode()
        asked, taken = policy.index(proposal), policy.index(action)
        return action, {
            "log_prob": safe.log_prob(action),
            "allowed": verdict.allowed,
            "risk": jnp.take_along_axis(verdict.risk, taken[:, None], -1)[:, 0],
            "stepped_in": asked != taken,
        }

    def _candidates(self, policy: TanhNormal, token: Token, key: Key) -> jax.Array:
        """The policy's own choice first, then more of its samples, last the middle of the range (coast)."""
        first_key, *keys = jax.random.split(key, CANDIDATES)
        proposal = self._choose(policy, token, first_key)
        return jnp.stack([proposal, *(policy.sample(k) for k in keys), jnp.full_like(proposal, policy.centre)], 1)

    def _first_tolerable(
        self, policy: TanhNormal, candidates: jax.Array, risks: jax.Array, risk: jax.Array | float
    ) -> tuple[jax.Array, PyTree]:
        """The policy's action if its risk is tolerable, else the first of the other candidates whose risk is.

        So the guard changes no more than it must. To a learner it is part of the world: what counts is what was
        proposed.
        """
        chosen = (risks <= tolerated(risks, risk)).argmax(-1)  # one always is: the least risky one
        action = jnp.take_along_axis(candidates, chosen[:, None, None], 1)[:, 0]
        return action, {
            "log_prob": policy.log_prob(candidates[:, 0]),
            "proposal": candidates[:, 0],
            "risk": jnp.take_along_axis(risks, chosen[:, None], 1)[:, 0],
            "stepped_in": chosen > 0,
        }


def bold_rows(rows: int, share: float) -> jax.Array:
    """[row] bool: the rows that play with a larger risk, the first `share` of them.

    A guard learns from what is played. What it forbids is played no more, and a wrong verdict would stand for ever.
    """
    return jnp.arange(rows) < round(share * rows)
