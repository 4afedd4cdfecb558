"""The paper's three ablations of Safe AD, at a reduced size: context length, layers, share of the data.

safeicrl collect
python bench/ablate_safe_ad.py --out runs/safe-ad-ablations

Seven runs in one process, all with the same number of gradient steps. The three shares of the data use one compiled
program. Writes the results of each run, ablations.json with their summaries, and ablations.png, the paper's figure.
"""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import matplotlib as mpl
from common import provenance
from matplotlib.figure import Figure
from rich.console import Console

from safeicrl.algos.safe_ad import SafeAD, SafeADConfig
from safeicrl.evaluation import plots
from safeicrl.evaluation.archive import save_results
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import standard_error, summarise
from safeicrl.files import write_json
from safeicrl.histories.store import Histories, open_histories
from safeicrl.histories.windows import make_windows
from safeicrl.nets.decision_transformer import DecisionConfig

TITLES = {"context": "steps of context", "layers": "layers", "share": "share of the histories"}

update = eqx.filter_jit(lambda algo, state: algo.update(state), donate="all-except-first")


def variants(args: argparse.Namespace) -> dict[str, list[Any]]:
    """Ablation → its values; the base run is in each."""
    return {"context": args.contexts, "layers": args.layers, "share": args.shares}


def build(histories: Histories, args: argparse.Namespace, context: int, layers: int) -> SafeAD:
    """The algorithm on all the data. A gradient step reads the same number of steps at every context."""
    attention, residual, embedding = args.dropout
    net = DecisionConfig(
        width=args.width, layers=layers, heads=max(1, args.width // 64), context=context,
        attention_dropout=attention, residual_dropout=residual, embedding_dropout=embedding,
    )  # fmt: skip
    config = SafeADConfig(
        histories=args.histories, iterations=args.iterations, updates=args.updates // args.iterations,
        batch=max(1, args.batch * args.contexts[0] // context), stride=args.stride, warmup=args.updates // 10,
        learning_rate=args.rate, net=net,
    )  # fmt: skip
    return SafeAD(histories.env, config, histories)


def run(algo: SafeAD, label: str, args: argparse.Namespace) -> tuple[Results, dict[str, Any]]:
    """Train, then evaluate on unseen rooms."""
    begin = time.perf_counter()
    state = eqx.filter_jit(algo.init)(jax.random.key(args.seed))
    for _ in range(args.iterations):
        state, metrics = update(algo, state)
    metrics = {name: float(value) for name, value in metrics.items()}
    trained = time.perf_counter() - begin
    results = evaluate(
        algo.env, algo.agent(state), tasks=args.tasks, rows=args.tasks, episodes=args.episodes, seed=args.seed,
        label=label, meta={"algo": dataclasses.asdict(algo.config)},
    )  # fmt: skip
    parameters = sum(x.size for x in jax.tree.leaves(eqx.filter(state.net, eqx.is_array)))
    about = {
        "parameters": parameters, "windows": int(algo.windows.count), "train_s": trained,
        "evaluate_s": results.meta["seconds"], "loss": metrics["loss"], "accuracy": metrics["accuracy"],
        "summary": dataclasses.asdict(summarise(results)),
    }  # fmt: skip
    return results, about


@mpl.rc_context(plots.STYLE)
def draw(found: dict[str, dict[str, Results]]) -> Figure:
    """Return and cost of an episode against its index, an ablation a column."""
    figure = Figure(figsize=(9.6, 5.2))
    axes = figure.subplots(2, len(found), sharex=True, sharey="row", squeeze=False)
    for column, (ablation, runs) in enumerate(found.items()):
        for colour, (label, results) in zip(plots.PALETTE, runs.items(), strict=False):
            for axis, values in zip(axes[:, column], (results.returns, results.costs), strict=True):
                mean, error = values.mean(0), standard_error(values)
                x = range(1, len(mean) + 1)
                axis.fill_between(x, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)
                axis.plot(x, mean, color=colour, label=label)
        axes[0, column].set(title=TITLES[ablation])
        axes[0, column].legend(frameon=False, fontsize=8)
        axes[1, column].set(xlabel="episode")
    axes[0, 0].set(ylabel="episode return")
    axes[1, 0].set(ylabel="episode cost")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", default="histories/safe-dark-room")
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 500, 1000], help="the first is the base")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8], help="the middle one is the base")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.5, 1.0], help="of the histories")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument(
        "--dropout", type=float, nargs=3, default=[0.5, 0.1, 0.3], help="of attention, residuals and embeddings"
    )
    parser.add_argument("--batch", type=int, default=256, help="windows in a gradient step of the base run")
    parser.add_argument("--stride", type=int, default=20, help="every n-th episode")
    parser.add_argument("--updates", type=int, default=2000, help="gradient steps of each run")
    parser.add_argument("--iterations", type=int, default=20, help="calls of the program that these are cut into")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--episodes", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/safe-ad-ablations"))
    args = parser.parse_args()
    about, console = provenance(), Console()
    histories = open_histories(args.histories)
    base = {"context": args.contexts[0], "layers": args.layers[len(args.layers) // 2], "share": 1.0}
    done: dict[tuple, tuple[Results, dict[str, Any]]] = {}
    found: dict[str, dict[str, Results]] = {}
    for ablation, values in variants(args).items():
        found[ablation] = {}
        for value in values:
            what = {**base, ablation: value}
            key = tuple(what.values())
            if key not in done:
                algo = build(histories, args, what["context"], what["layers"])
                few = make_windows(histories, what["context"], stride=args.stride, share=what["share"])
                algo = eqx.tree_at(lambda a: a.windows.count, algo, few.count)
                differs = [f"{k} {v:g}" for k, v in what.items() if v != base[k]] or ["base"]
                done[key] = run(algo, f"Safe AD, {differs[0]}", args)
                save_results(done[key][0], args.out / "-".join(f"{k}{v:g}" for k, v in what.items()))
                summary = done[key][1]["summary"]
                console.print(
                    f"{done[key][0].label}: total return {summary['total_return']:.2f}, over budget "
                    f"{summary['over_budget']:.1%}, trained {done[key][1]['train_s']:.0f} s, "
                    f"evaluated {done[key][1]['evaluate_s']:.0f} s"
                )
            found[ablation][f"{value:g}"] = done[key][0]
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
    runs = [{**result[1], "label": result[0].label} for result in done.values()]
    write_json(args.out / "ablations.json", {**about, "settings": settings, "base": base, "runs": runs})
    print(plots.save(draw(found), args.out / "ablations.png"))


if __name__ == "__main__":
    main()
