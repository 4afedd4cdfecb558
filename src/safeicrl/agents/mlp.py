"""An agent without memory: a feed-forward network on the observation alone, whatever the budget."""

import equinox as eqx
import jax

from safeicrl.envs.api import EnvSpec, Key, PyTree
from safeicrl.nets.feedforward import (
    FeedForward,
    Normaliser,
    action_outputs,
    distribution,
    encode,
    first_normaliser,
)
from safeicrl.tokens import Token


class MlpAgent(eqx.Module):
    """Acts by the actor network on the observation alone; it does not see the budget."""

    net: FeedForward
    log_std: jax.Array | None  # [action], of continuous actions
    normaliser: Normaliser | None  # of real-valued observations
    spec: EnvSpec = eqx.field(static=True)
    temperature: float = eqx.field(static=True, default=1.0)  # 0: greedy

    @classmethod
    def build(cls, spec: EnvSpec, hidden: tuple[int, ...]) -> "MlpAgent":
        """An agent of this form; its arrays are filled in later."""
        outputs, log_std = action_outputs(spec)
        return cls(
            net=FeedForward(spec.observation.encoded_size, hidden, outputs, jax.random.key(0)),
            log_std=log_std,
            normaliser=first_normaliser(spec),
            spec=spec,
        )

    def init(self, tasks: PyTree, rows: int) -> None:
        """No memory."""

    def extend(self, memory: None, steps: int) -> None:
        """No memory."""

    def act(self, memory: None, token: Token, key: Key) -> tuple[None, jax.Array, PyTree]:
        """A sampled action, or the most probable one."""
        policy = distribution(self.net(encode(token.observation, self.spec, self.normaliser)), self.log_std)
        if self.temperature == 0:
            return None, policy.mode(), None
        policy = policy if self.temperature == 1 else policy.tempered(self.temperature)
        return None, policy.sample(key), None
