"""Safe AD as an agent: it asks its decision transformer for actions that reach a return within a budget."""

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.envs.api import Key, PyTree, record, replace
from safeicrl.envs.spaces import Box
from safeicrl.errors import UserError
from safeicrl.nets.decision_transformer import DecisionNet, Scales, Steps
from safeicrl.tokens import Token

RTG_FLOOR = 0.1  # the least return asked for, as a share of the greatest (paper, "Evaluation Setup")


@record
class Memory:
    """The window: the last steps of each row's trial, from the left. What lies beyond `length` is never seen."""

    steps: Steps  # [row, context, ...]
    length: jax.Array  # [row] int32
    start: jax.Array  # [row] int32, where the present episode begins; negative if before the window


class DecisionAgent(eqx.Module):
    """Safe AD acting: it reads its whole window anew at every step, exactly as in training.

    It cannot keep keys and values from step to step. When an episode ends, the numbers to go of its steps change
    from the return and cost that were asked for to those that it really got.
    """

    net: DecisionNet
    scales: Scales
    temperature: float = eqx.field(static=True, default=1.0)  # 0: greedy

    def init(self, tasks: PyTree, rows: int) -> Memory:
        """An empty window."""
        spec, shape = self.net.spec, (rows, self.net.config.context)
        steps = Steps(
            observation=spec.observation.zeros(shape),
            action=spec.action.zeros(shape),
            reward=jnp.zeros(shape),
            cost=jnp.zeros(shape),
            rtg=jnp.zeros(shape),
            ctg=jnp.zeros(shape),
            time=jnp.zeros(shape, jnp.int32),
        )
        return Memory(steps=steps, length=jnp.zeros(rows, jnp.int32), start=jnp.zeros(rows, jnp.int32))

    def extend(self, memory: Memory, steps: int) -> Memory:
        """The window has its full size from the start."""
        return memory

    def act(self, memory: Memory, token: Token, key: Key) -> tuple[Memory, jax.Array, PyTree]:
        """Remember the last step, then ask for the next action."""
        space = self.net.spec.action
        memory = self.remember(memory, token)
        out = self.net(memory.steps, self.scales)  # [row, context, out]
        out = jnp.take_along_axis(out, (memory.length - 1)[:, None, None], axis=1)[:, 0]
        if isinstance(space, Box) and not self.net.samples:
            if self.temperature != 0:
                raise UserError(
                    "this Safe AD predicts the mean of real-valued actions: it has no temperature "
                    "(--algo.net.actions sampled trains one that has)"
                )
            return memory, jnp.clip(out, space.low, space.high), None
        policy = self.net.policy(out)
        action = policy.mode() if self.temperature == 0 else policy.tempered(self.temperature).sample(key)
        return memory, action, None

    def remember(self, memory: Memory, token: Token) -> Memory:
        """The window with the last step completed and the present one, its action still open, at its end."""
        steps, last = memory.steps, memory.length - 1
        index = jnp.arange(self.net.config.context)
        at = index == last[:, None]  # [row, context]
        steps = replace(
            steps,
            action=_put(steps.action, at, token.action),
            reward=_put(steps.reward, at, token.reward),
            cost=_put(steps.cost, at, token.cost),
        )
        # At an episode's end, subtract what is left of the request from all its steps: they then hold what it got.
        left = [jnp.where(at, x, 0).sum(1) for x in (steps.rtg - steps.reward, steps.ctg - steps.cost)]  # [row]
        ended = token.start[:, None] & (index >= memory.start[:, None])
        steps = replace(
            steps,
            rtg=steps.rtg - jnp.where(ended, left[0][:, None], 0),
            ctg=steps.ctg - jnp.where(ended, left[1][:, None], 0),
        )
        full = memory.length == len(index)
        steps = jax.tree.map(lambda x: _where(full, jnp.roll(x, -1, axis=1), x), steps)
        length = jnp.where(token.first, 0, memory.length - full)
        at = index == length[:, None]
        steps = replace(
            steps,
            observation=_put(steps.observation, at, token.observation),
            rtg=_put(steps.rtg, at, jnp.where(token.start, self.target(token.ctg), left[0])),
            ctg=_put(steps.ctg, at, token.ctg),
            time=_put(steps.time, at, token.time),
        )
        return Memory(steps=steps, length=length + 1, start=jnp.where(token.start, length, memory.start - full))

    def target(self, budget: jax.Array) -> jax.Array:
        """The return to ask for with a budget: the paper's pairs, as a share of the greatest return in the data."""
        share = budget / max(self.net.spec.bounds("test")[1], 1e-6)
        return self.scales.returns[1] * jnp.clip(share, RTG_FLOOR, 1.0)

    @property
    def known_budgets(self) -> tuple[float, float]:
        """Least and greatest cost of an episode in the data: budgets that the network has seen as a cost-to-go."""
        least, most = (float(x) for x in self.scales.costs)
        return least, most


def _put(x: jax.Array, at: jax.Array, value: jax.Array) -> jax.Array:
    """x [row, context, ...] with value [row, ...] where `at` [row, context]."""
    return jnp.where(at.reshape(at.shape + (1,) * (x.ndim - 2)), value[:, None], x)


def _where(rows: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(rows.reshape((-1,) + (1,) * (x.ndim - 1)), x, y)
