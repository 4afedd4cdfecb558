"""Average the weights of two policies of the same form, where one began with the other's networks.

python examples/average_policies.py runs/first runs/second --weight 0.7 --out my-policy

A short second stage moves the weights little, and points between the two stages act well too: how far to go is one
more knob between caution (the first) and exploration (the second).
"""

import argparse
from pathlib import Path

import equinox as eqx
import jax

from safeicrl import checkpoint
from safeicrl.policy import load_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", help="a policy's name, file or run folder")
    parser.add_argument("second")
    parser.add_argument("--weight", type=float, default=0.5, help="of the second")
    parser.add_argument("--temperature", type=float, help="of the averaged policy's actions by default")
    parser.add_argument("--name")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    first, second = load_policy(args.first), load_policy(args.second)
    mix = lambda a, b: (1 - args.weight) * a + args.weight * b if eqx.is_array(a) else a  # noqa: E731
    stages = [
        {"weight": w, **policy.card["training"]} for w, policy in ((1 - args.weight, first), (args.weight, second))
    ]
    card = {name: second.card[name] for name in ("kind", "net", "env", "limits")} | {"training": stages}
    for name in ("name", "temperature"):
        if getattr(args, name) is not None:
            card[name] = getattr(args, name)
    checkpoint.save_policy(args.out.with_suffix(".safetensors"), jax.tree.map(mix, first.agent, second.agent), card)


if __name__ == "__main__":
    main()
