"""What braking is worth to a Point policy that ignores its budget: the first episode, with the brake taken over.

python bench/braking.py runs/point-driver --out results/lab/point/braking.json

The run has the settings of results/lab/point/driver-config.json. Once the budget is spent, and outside hazards, the
robot brakes with a given probability at each step instead of doing what the policy says. A little braking costs
return and saves no cost, so gradients do not lead to more of it.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from safeicrl.agents.api import WrappedAgent
from safeicrl.envs.api import Key, PyTree
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.files import write_json
from safeicrl.policies.policy import load_policy
from safeicrl.provenance import surroundings
from safeicrl.tokens import Token

SHARES = (0.0, 0.1, 0.3, 1.0)
SLOW = 0.03  # metres per step; below it the thrust is eased


class Braking(WrappedAgent):
    """An agent whose thrust is taken over, with a probability, when its budget is spent."""

    share: float

    def act(self, memory: PyTree, token: Token, key: Key) -> tuple[PyTree, jax.Array, PyTree]:
        """Thrust against the motion along the robot's nose, or what the agent does."""
        memory, action, extras = self.agent.act(memory, token, key)
        nose = token.observation[:, jnp.array([3, 6])]  # first column of the rotation matrix
        speed = ((token.observation - token.previous)[:, :2] * nose).sum(-1)
        brake = jnp.where(jnp.abs(speed) > SLOW, -jnp.sign(speed), -0.05 * speed / SLOW)
        lot = jax.random.bernoulli(jax.random.fold_in(key, 1), self.share, brake.shape)
        brakes = lot & (token.ctg < 0) & (token.cost == 0)
        return memory, action.at[:, 0].set(jnp.where(brakes, brake, action[:, 0])), extras


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="a run, a file, or the name of a pretrained policy for Point")
    parser.add_argument("--budget", type=float, default=20.0)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    policy = load_policy(args.policy)
    rows = []
    for share in SHARES:
        agent = Braking(policy.agent, share)
        budgets = (args.budget, args.budget)
        found = evaluate(policy.env, agent, tasks=args.tasks, episodes=1, budgets=budgets, budget_count=1)
        rows.append(
            {
                "share": share,
                "return": float(found.returns.mean()),
                "cost": float(found.costs.mean()),
                "excess": float(np.maximum(found.costs - args.budget, 0).mean()),
                "excess_error": float(np.maximum(found.costs - args.budget, 0).std(ddof=1) / args.tasks**0.5),
                "over_budget": float(found.over.mean()),
            }
        )
        Console().print({name: round(value, 3) for name, value in rows[-1].items()})
    if args.out is not None:
        write_json(args.out, {"budget": args.budget, "tasks": args.tasks, "braking": rows, **surroundings()})


if __name__ == "__main__":
    main()
