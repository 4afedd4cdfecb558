"""A policy past its training: it plays M times the K episodes it was trained on, on unseen tasks.

python bench/beyond.py safe-dark-room                            → results/beyond/safe-dark-room.json
python bench/beyond.py safe-dark-room --known 0 --out FILE       as it would act if it saw every episode's index
python bench/beyond.py safe-velocity-ant --times 1 --known 9     it sees no index after the ninth episode's
python bench/beyond.py safe-velocity-ant --context 600           it remembers the last 600 steps
python bench/beyond.py safe-velocity-ant --ring --out FILE       its memory goes on as a ring
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from common import provenance
from rich.console import Console
from rich.table import Table

from safeicrl.agents.api import with_options
from safeicrl.agents.in_context import InContextAgent
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.evaluation.results import Results
from safeicrl.files import write_json
from safeicrl.policies.cards import read_card
from safeicrl.policies.catalogue import find_policy, load_agent


def closing(lengths: np.ndarray, context: int) -> dict[str, Any]:
    """From which episode on the oldest tokens are overwritten, in how many trials. `lengths`: [trial, episode]."""
    full = lengths.cumsum(axis=1) > context
    episode = full.argmax(axis=1)[full.any(axis=1)] + 1  # [trial that got there]
    if not len(episode):
        return {"share": 0.0}
    quantiles = dict(zip(("first", "median", "last"), np.quantile(episode, (0, 0.5, 1)).tolist(), strict=True))
    return {"share": len(episode) / len(lengths), **quantiles}


def blocks(results: Results, size: int) -> list[dict[str, Any]]:
    """Return, cost and share over budget per episode, by blocks of `size` episodes."""
    return [
        {
            "episodes": [first + 1, min(first + size, results.returns.shape[1])],
            "return": float(results.returns[:, first : first + size].mean()),
            "cost": float(results.costs[:, first : first + size].mean()),
            "over": float(results.over[:, first : first + size].mean()),
        }
        for first in range(0, results.returns.shape[1], size)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="a pretrained policy's name, a file, or a run's folder; of kind net")
    parser.add_argument("--times", type=int, default=3, help="M: it plays M·K episodes")
    parser.add_argument("--block", type=int, help="episodes in a block of the table; K by default")
    parser.add_argument("--known", type=int, help="episodes whose index it sees; K by default, 0: all")
    parser.add_argument("--context", type=int, help="steps that it remembers; as in training by default")
    parser.add_argument(
        "--ring", action="store_true", help="go on as in training, with a memory that never settles"
    )
    parser.add_argument("--greedy", action="store_true", help="the most probable actions, not sampled ones")
    parser.add_argument("--reserve", type=float, nargs="*", help="as safeicrl evaluate; the card's by default")
    parser.add_argument("--brake", type=float, help="what its card says by default")
    parser.add_argument("--settle-after", type=int, help="episodes; what its card says by default")
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--rows", type=int, default=32, help="tasks at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="results/beyond/POLICY.json by default")
    args = parser.parse_args()

    about, path = provenance(), find_policy(args.policy)
    card = read_card(path)
    if args.context is not None:  # no weight depends on it
        card = {**card, "net": {**card["net"], "context": args.context}}
    env, agent = load_agent(path, card)
    if not isinstance(agent, InContextAgent):
        parser.error(
            f"{args.policy} is of kind {card['kind']!r}: only policies of kind 'net' see an episode's index"
        )
    trained, context = agent.trained_episodes or env.spec.episodes, card["net"]["context"]
    if args.known is not None:
        agent = dataclasses.replace(agent, trained_episodes=args.known or None)
    temperature = None if args.greedy else card.get("temperature")
    reserve = tuple(args.reserve) if args.reserve else None
    if args.settle_after is not None and (args.ring or args.known == 0):
        parser.error("a memory that settles is no ring, and knows K: leave out --settle-after")
    acting, how = with_options(
        env, agent, temperature=temperature, greedy=args.greedy, reserve=reserve, brake=args.brake,
        settle_after=args.settle_after,
    )  # fmt: skip
    episodes = args.times * trained
    results = evaluate(
        env, acting, tasks=args.tasks, rows=args.rows, episodes=episodes, seed=args.seed, settle=not args.ring
    )

    found = blocks(results, args.block or trained)
    # a settled memory grows no more, but for the few episodes that are kept
    grows = episodes if args.ring else how.get("settle_after", agent.trained_episodes or episodes)
    closes = closing(results.lengths[:, :grows], context)
    table = Table(title=f"{args.policy}, trained on {trained} episodes, {args.tasks} unseen tasks")
    for name in ("episodes", "return", "cost", "over budget"):
        table.add_column(name, justify="right")
    for block in found:
        first, last = block["episodes"]
        table.add_row(f"{first}–{last}", f"{block['return']:.3f}", f"{block['cost']:.2f}", f"{block['over']:.2%}")
    console = Console()
    console.print(table)
    console.print(f"context of {context} steps full in {closes['share']:.0%} of the trials: {closes}")
    settings = {
        "policy": args.policy, "trained_episodes": trained, "known_episodes": agent.trained_episodes,
        "context_steps": context, "settles": not args.ring, "actions": how["actions"], "tasks": args.tasks,
        "rows": args.rows, "seed": args.seed,
        **{option: how[option] for option in ("reserve", "brake", "settle_after") if option in how},
    }  # fmt: skip
    curves = {
        "returns": results.returns.mean(axis=0).round(4).tolist(),
        "costs": results.costs.mean(axis=0).round(4).tolist(),
        "over": results.over.mean(axis=0).round(4).tolist(),
    }
    out = args.out or Path(f"results/beyond/{path.stem}.json")
    seconds = round(results.meta["seconds"], 1)
    write_json(
        out, {**about, **settings, "seconds": seconds, "blocks": found, "context_full": closes, "episodes": curves}
    )


if __name__ == "__main__":
    main()
