"""Proposition 1: the distance between training and test goals as α grows: TV → 1, both KL → ∞.

python examples/proposition_1.py --out docs/images/proposition_1.svg        prints a table and draws the figure
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from safeicrl.envs.spawn import divergence


@dataclass(frozen=True)
class Args:
    size: int = 9
    alphas: tuple[float, ...] = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # rows of the table
    out: Path = Path("proposition_1.svg")


def main(args: Args) -> None:
    table = Table(title=f"{args.size}×{args.size}: training against test spawning")
    for name in ("α", "TV", "KL(train‖test)", "KL(test‖train)"):
        table.add_column(name, justify="right")
    for alpha in args.alphas:
        table.add_row(f"{alpha:g}", *(f"{x:.4f}" for x in divergence(args.size, alpha)))
    Console().print(table)

    grid = np.linspace(0, max(args.alphas), 200)
    values = np.array([divergence(args.size, alpha) for alpha in grid])
    plt.rcParams["svg.hashsalt"] = "proposition 1"  # the same figure, byte for byte, each time
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    left.plot(grid, values[:, 0], color="#0072B2")
    left.set(title="total variation distance", xlabel="α", ylim=(0, 1.03))
    right.plot(grid, values[:, 1], color="#D55E00", label="KL(train‖test)")
    right.plot(grid, values[:, 2], color="#009E73", label="KL(test‖train)")
    right.set(title="KL divergence", xlabel="α", ylim=(0, None))
    right.legend(frameon=False)
    for axis in (left, right):
        axis.axvline(0.5, color="#999999", linestyle=":")  # the paper's α
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main(tyro.cli(Args))
