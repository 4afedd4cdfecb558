"""What a long context does to a policy: unchanged, with the episode index held, and with a short window.

python bench/long_context.py safe-velocity-ant --seed 1000 --out results/lab/ant/long-context.json
"""

import argparse
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from safeicrl.agents.api import Agent, WrappedAgent, with_options
from safeicrl.envs.api import Key, PyTree, replace
from safeicrl.envs.registry import env_to_plain
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.evaluation.results import Results
from safeicrl.files import write_json
from safeicrl.policies import cards
from safeicrl.policies.catalogue import find_policy, load_agent
from safeicrl.provenance import surroundings
from safeicrl.tokens import Token


class Held(WrappedAgent):
    """An agent that is told no episode's index beyond `at`."""

    at: int = eqx.field(static=True)

    def act(self, memory: PyTree, token: Token, key: Key) -> tuple[PyTree, jax.Array, PyTree]:
        """As the agent acts in an earlier episode."""
        return self.agent.act(memory, replace(token, episode=jnp.minimum(token.episode, self.at)), key)


def figures(results: Results) -> dict[str, Any]:
    """Return and cost by episode, and how often the budget is broken."""
    by_episode = {name: getattr(results, name).mean(axis=0).round(3).tolist() for name in ("returns", "costs")}
    return {**by_episode, "over": float(results.over.mean()), "over_last_five": float(results.over[:, -5:].mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="a pretrained policy's name, a file, or a run's folder; of kind net")
    parser.add_argument("--hold", type=int, default=8, help="the largest episode index the agent is told")
    parser.add_argument("--window", type=int, default=8, help="episodes of the short window")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    path = find_policy(args.policy)
    card = cards.read_card(path)
    env, agent = load_agent(path, card)
    context = args.window * env.spec.max_steps
    _, short = load_agent(path, {**card, "net": {**card["net"], "context": context}})  # no weight depends on it
    usual, in_window = (with_options(env, x, temperature=card.get("temperature"))[0] for x in (agent, short))
    agents: dict[str, Agent] = {
        "as it is": usual,
        "greedy": with_options(env, agent, greedy=True)[0],
        f"index held at {args.hold}": Held(agent=usual, at=args.hold),
        f"window of {args.window} episodes": in_window,
    }
    found = {}
    for name, each in agents.items():
        results = evaluate(env, each, tasks=args.tasks, seed=args.seed)
        found[name] = figures(results)
        best = int(np.argmax(found[name]["returns"]))
        Console().print(
            f"{name}: return {found[name]['returns'][best]:.1f} in episode {best + 1}, "
            f"{found[name]['returns'][-1]:.1f} in the last; cost {min(found[name]['costs']):.2f} at least, "
            f"{found[name]['costs'][-1]:.2f} in the last"
        )
    if args.out is not None:
        asked = {"policy": args.policy, "env": env_to_plain(env), "tasks": args.tasks, "seed": args.seed}
        write_json(args.out, {**asked, "agents": found, **surroundings()})


if __name__ == "__main__":
    main()
