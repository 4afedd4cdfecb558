"""The policy network as an agent: sampled, tempered or greedy."""

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.envs.api import Key, PyTree, replace
from safeicrl.nets.heads import Distribution, PolicyNet
from safeicrl.nets.transformer import Cache
from safeicrl.tokens import Token


class InContextAgent(eqx.Module):
    """Acts by the network on everything it has seen in the trial."""

    net: PolicyNet
    epsilon: jax.Array | None = None  # [] exploration added while training off-policy
    temperature: float = eqx.field(static=True, default=1.0)  # 0: greedy
    trained_episodes: int | None = eqx.field(static=True, default=None)  # K; None: no limit, see `policy`

    def init(self, tasks: PyTree, rows: int) -> Cache:
        """An empty context."""
        return self.net.trunk.init_cache(rows, 0)

    def extend(self, memory: Cache, steps: int) -> Cache:
        """Room for `steps` tokens, at most the network's context."""
        return self.net.trunk.extend_cache(memory, steps)

    def act(self, memory: Cache, token: Token, key: Key) -> tuple[Cache, jax.Array, PyTree]:
        """Read the tokens, choose the actions, and record their log-probabilities under the policy acted by."""
        memory, policy = self.policy(memory, token)
        if self.temperature == 0:
            return memory, policy.mode(), None
        policy = policy if self.temperature == 1 else policy.tempered(self.temperature)
        policy = policy if self.epsilon is None else policy.explored(self.epsilon)
        action = policy.sample(key)
        return memory, action, {"log_prob": policy.log_prob(action)}

    def policy(self, memory: Cache, token: Token) -> tuple[Cache, Distribution]:
        """π(· | history) for the newest token of each row.

        The network knows the indices of `trained_episodes` episodes, and goes wrong on larger ones. Every later
        episode has the last index that it knows, so a trial can go on for as long as the user likes.
        """
        known = token
        if self.trained_episodes is not None:
            known = replace(token, episode=jnp.minimum(token.episode, self.trained_episodes - 1))
        # not `known.first`: after single episodes of training, every start would count as a new trial
        memory, features = self.net.trunk.step(memory, known, token.first)
        return memory, self.net.distribution(features)
