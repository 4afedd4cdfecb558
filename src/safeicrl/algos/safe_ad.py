"""Safe AD: algorithm distillation for safe reinforcement learning, the paper's supervised baseline.

A decision transformer imitates the learning histories of a safe learner (histories/), in windows of many episodes.
In training, every step carries the return and the cost that followed it. In use, it carries those that are wanted.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from safeicrl.agents.api import Agent
from safeicrl.agents.decision import DecisionAgent
from safeicrl.envs.api import Env, Key, PyTree, record, refuse_several, replace
from safeicrl.envs.spaces import Discrete
from safeicrl.errors import UserError, check_integer, check_number
from safeicrl.histories.store import open_histories
from safeicrl.histories.windows import Windows, make_windows, measure_scales
from safeicrl.machine.devices import over_rows
from safeicrl.nets.decision_transformer import DecisionConfig, DecisionNet, Scales, Steps


@dataclass(frozen=True)
class SafeADConfig:
    """All of Safe AD's settings; the defaults are the paper's table for SafeDarkRoom."""

    histories: str = "histories/safe-dark-room"  # folder that `safeicrl collect` wrote
    iterations: int = 100  # of the run
    updates: int = 50  # gradient steps in an iteration
    batch: int = 512  # windows in a gradient step
    stride: int = 1  # every n-th episode of a history, so that a window spans learning progress
    share: float = 1.0  # of the histories
    learning_rate: float = 3e-4  # Adam's, at its peak
    final_rate: float = 0.1  # share of the learning rate left at the end of its cosine
    warmup: int = 500  # gradient steps
    betas: tuple[float, float] = (0.9, 0.99)  # Adam's
    weight_decay: float = 0.0  # above 0 it is AdamW; the paper has Adam
    clip: float = 1.0  # norm of the gradient
    net: DecisionConfig = field(default_factory=DecisionConfig)

    def __post_init__(self) -> None:
        for name in ("iterations", "updates", "batch", "stride"):
            check_integer(name, getattr(self, name), 1)
        check_integer("warmup", self.warmup, 0)
        for name in ("share", "learning_rate", "clip"):
            check_number(name, getattr(self, name), 0.0, strict=True)
        for name in ("final_rate", "weight_decay"):
            check_number(name, getattr(self, name), 0.0)
        for name in ("share", "final_rate"):
            if getattr(self, name) > 1:
                raise UserError(f"{name} must be at most 1, got {getattr(self, name)}")
        if len(self.betas) != 2 or not all(0 <= check_number("betas", beta, 0.0) < 1 for beta in self.betas):
            raise UserError(f"betas must be two numbers below 1, got {self.betas}")


@record
class SafeADState:
    """Everything that changes in training."""

    net: DecisionNet
    optimiser: PyTree
    key: Key


class SafeAD(eqx.Module):
    """The algorithm, as the trainer sees it. A pytree: its data set is an argument of the compiled program."""

    windows: Windows
    scales: Scales
    env: Env = eqx.field(static=True)
    config: SafeADConfig = eqx.field(static=True)
    metrics = ("env_steps", "loss")

    def __init__(self, env: Env, config: SafeADConfig, histories: Any = None):
        refuse_several(env.spec, "safe-ad")
        if histories is None:
            histories = open_histories(config.histories, env=env)
        self.env, self.config = env, config
        self.windows = make_windows(histories, config.net.context, stride=config.stride, share=config.share)
        self.scales = measure_scales(self.windows, env.spec)

    def init(self, key: Key) -> SafeADState:
        """A new state."""
        net_key, key = jax.random.split(key)
        net = DecisionNet(self.config.net, self.env.spec, net_key)
        return SafeADState(net=net, optimiser=self.optimiser.init(eqx.filter(net, eqx.is_array)), key=key)

    def start_from(self, state: SafeADState, other: SafeADState) -> SafeADState:
        """A new run's state with another run's network."""
        return replace(state, net=other.net)

    def agent(self, state: SafeADState) -> Agent:
        """The policy: sampled, but where the network predicts the mean of real-valued actions."""
        return DecisionAgent(net=state.net, scales=self.scales, temperature=float(state.net.samples))

    def card(self) -> dict[str, Any]:
        """What rebuilds the policy around its arrays."""
        return {"kind": "decision", "net": dataclasses.asdict(self.config.net)}

    def update(self, state: SafeADState) -> tuple[SafeADState, dict[str, jax.Array]]:
        """`config.updates` gradient steps on random windows."""
        config = self.config
        key, learn_key = jax.random.split(state.key)
        # only arrays may be carried by a scan
        arrays, static = eqx.partition(state.net, eqx.is_array)

        def step(carry: tuple, key: Key) -> tuple:
            arrays, optimiser = carry
            window_key, drop_key = jax.random.split(key)
            steps = over_rows(self.windows.sample(window_key, config.batch, config.net.context))
            grad = jax.value_and_grad(lambda a: self.loss(eqx.combine(a, static), steps, drop_key), has_aux=True)
            (loss, right), gradient = grad(arrays)
            updates, optimiser = self.optimiser.update(gradient, optimiser, arrays)
            seen = {"loss": loss, **right, "grad_norm": optax.tree.norm(gradient)}
            return (optax.apply_updates(arrays, updates), optimiser), seen

        keys = jax.random.split(learn_key, config.updates)
        (arrays, optimiser), seen = jax.lax.scan(step, (arrays, state.optimiser), keys)  # type: ignore[var-annotated]
        read = config.updates * config.batch * config.net.context
        metrics = {name: value.mean() for name, value in seen.items()}
        metrics |= {"env_steps": jnp.int32(read), "tokens": jnp.int32(read * self.tokens)}
        return SafeADState(net=eqx.combine(arrays, static), optimiser=optimiser, key=key), metrics

    def loss(self, net: DecisionNet, steps: Steps, key: Key | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The paper's losses: cross-entropy of discrete actions, squared error of real-valued ones.

        Where real-valued actions are sampled, the loss is their negative log-density.
        """
        out = net(steps, self.scales, key)
        if isinstance(self.env.spec.action, Discrete):
            losses = optax.softmax_cross_entropy_with_integer_labels(out, steps.action.astype(jnp.int32))
            return losses.mean(), {"accuracy": (out.argmax(-1) == steps.action).mean()}
        if net.samples:
            policy = net.policy(out)
            return -policy.log_prob(steps.action).mean(), {"error": _error(policy.mode(), steps.action)}
        return _error(out, steps.action), {}

    @property
    def row_axes(self) -> dict[str, int]:
        """What is divided among devices."""
        return {"algo.batch": self.config.batch}

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return 4 if self.config.net.tokens == "four" else 1

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam(W) with a warm-up, then a cosine."""
        config = self.config
        total = max(config.iterations * config.updates, config.warmup + 1)
        rate = optax.warmup_cosine_decay_schedule(
            0.0, config.learning_rate, config.warmup, total, config.learning_rate * config.final_rate
        )
        return optax.chain(
            optax.clip_by_global_norm(config.clip),
            optax.adamw(rate, *config.betas, weight_decay=config.weight_decay),
        )


def _error(mean: jax.Array, action: jax.Array) -> jax.Array:
    """Mean squared distance of two arrays of actions, [row, time, action]."""
    return ((mean - action) ** 2).sum(-1).mean()
