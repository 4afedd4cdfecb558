"""The commands that write a policy from another one: export, fit-guard."""

import dataclasses
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from safeicrl.cli.options import parse
from safeicrl.errors import UserError
from safeicrl.plugins import import_options

# -- export -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write one policy and its card, to take elsewhere or to ship."""

    # name or path of a policy, or folder of a run
    policy: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="POLICY")] = None
    out: Path | None = None  # file to write: OUT.safetensors, and its card OUT.json
    # folder to write instead, as model hubs lay it out: weights, model card, configuration, evaluation, film
    hub: Path | None = None
    onnx: Path | None = None  # file to write instead: one step of the policy as an ONNX graph, to act without JAX
    film: bool = True  # whether --hub films one unseen task
    seed: int | None = None  # seed of the run; by default the one with the best evaluation
    # a related policy or run, one trained further from the other: exports their mean weights; may be repeated
    average: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    name: str | None = None  # the policy's name in tables and figures
    description: str | None = None  # a sentence about the policy, for the card
    temperature: float | None = None  # of its actions; what its card says by default
    risk: float | None = None  # that its guard tolerates; what its card says by default
    # of the budget, see safeicrl evaluate; what its card says by default
    reserve: Annotated[tuple[float, ...] | None, tyro.conf.arg(metavar="AMOUNT [BELOW [OTHERS]]")] = None
    brake: float | None = None  # see safeicrl evaluate; what its card says by default
    # episodes after which its memory settles; what its card says by default
    settle_after: int | None = None
    env_args: tuple[str, ...] = ()  # parameters of its environment to change, e.g. engine=auto
    # a limit of the policy, to add to those on its card; may be repeated
    limit: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    evaluation: Path | None = None  # results of safeicrl evaluate for the card, instead of those of training
    overwrite: bool = False  # replace an existing file


def export(args: list[str]) -> None:
    """Write one policy and its card, to take elsewhere or to ship."""
    from safeicrl.envs.registry import parse_parameters
    from safeicrl.evaluation.results import in_words
    from safeicrl.policies.export import export_policy
    from safeicrl.policies.policy import load_policy

    asked = parse("export", Export, args)
    targets = [target for target in (asked.out, asked.hub, asked.onnx) if target is not None]
    if asked.policy is None or len(targets) != 1:
        raise UserError(
            "export needs a policy (name, path or run folder) and a file, as in export RUN --out FILE; "
            "or, in place of --out, --hub FOLDER or --onnx FILE"
        )
    options: dict[str, Any] = {
        "seed": asked.seed, "average": asked.average, "name": asked.name, "description": asked.description,
        "temperature": asked.temperature, "risk": asked.risk, "reserve": asked.reserve, "brake": asked.brake,
        "settle_after": asked.settle_after, "limits": asked.limit, "evaluation": asked.evaluation,
        "env_args": parse_parameters(asked.env_args, "--env-args"), "overwrite": asked.overwrite,
    }  # fmt: skip
    if asked.hub is not None:
        return _export_hub(asked.policy, asked.hub, options, film=asked.film)
    if asked.onnx is not None:
        return _export_onnx(asked.policy, asked.onnx, options)
    path = export_policy(asked.policy, targets[0], **options)
    card = load_policy(path).card
    origin = card["exported"]["from"]
    if asked.average:
        origin = f"the mean of {', '.join([origin, *(part['from'] for part in card['averaged_with'])])}"
    print(f"wrote {path} and {path.with_suffix('.json')}: {origin}, {', '.join(in_words(card))}")
    evaluated = in_words(card.get("evaluation", {}))
    if evaluated and evaluated != in_words(card):
        print(f"but its card's evaluation is of {', '.join(evaluated)}: --evaluation makes them agree")
    print(f"load it:  policy = safeicrl.load_policy({str(path)!r})")


def _export_hub(policy: str, folder: Path, options: dict[str, Any], *, film: bool) -> None:
    from safeicrl.policies.contenders import released
    from safeicrl.policies.hub import FILM, export_hub, write_card
    from safeicrl.show.demo import film as shoot

    export_hub(policy, folder, **options)
    star = released(str(folder))
    if film and shoot(star, folder / FILM):
        write_card(folder, star.meta["card"])
    print(f"wrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(f"load it:  policy = safeicrl.load_policy({str(folder)!r})")


def _export_onnx(policy: str, out: Path, options: dict[str, Any]) -> None:
    """By way of an ordinary export in a temporary folder, so that all its options hold here too."""
    from safeicrl.policies.export import export_policy
    from safeicrl.policies.onnx import export_onnx
    from safeicrl.policies.policy import load_policy

    target = out.with_suffix(".onnx")
    if target.exists() and not options["overwrite"]:
        raise UserError(f"{target} exists: choose another --onnx, or --overwrite")
    with tempfile.TemporaryDirectory() as folder:
        path = export_onnx(load_policy(export_policy(policy, Path(folder) / "policy", **options)), out)
    print(f"wrote {path}; examples/onnx_runner.py acts with it, without JAX")


# -- fit-guard --------------------------------------------------------------------------------------------


def fit_guard(args: list[str]) -> int:
    """Fit a guard to a frozen policy, from what it plays: fit-guard POLICY --out FILE."""
    from safeicrl.machine.signals import StopRequest
    from safeicrl.optimisers.guard_fit import GuardFitConfig, GuardRound
    from safeicrl.policies.add_guard import add_guard

    helped = lambda kind, text: Annotated[kind, tyro.conf.arg(help=text)]  # noqa: E731
    form = dataclasses.make_dataclass(
        "FitGuard",
        [
            ("policy", Annotated[str, tyro.conf.Positional, tyro.conf.arg(help="name or path of the policy")]),
            ("out", helped(Path, "file to write: OUT.safetensors, and its card OUT.json")),
            ("overwrite", helped(bool, "replace an existing file"), field(default=False)),
            ("replace", helped(bool, "throw away a guard with which it was trained"), field(default=False)),
            ("what", Annotated[GuardFitConfig, tyro.conf.arg(name="")], field(default=GuardFitConfig())),
        ],
        frozen=True,
    )
    form.__doc__ = fit_guard.__doc__
    asked: Any = parse("fit-guard", form, args)

    def say(now: GuardRound) -> None:
        if stop.requested and now.round < asked.what.rounds:
            print(f"stopped on request after round {now.round} of {asked.what.rounds}")
        elif now.round == 1 or now.round % 5 == 0:
            print(
                f"round {now.round} of {asked.what.rounds}: a step costs with a chance of {now.predicted:.3f} "
                f"(observed {now.observed:.3f}), cross-entropy {now.loss:.4f}, {now.steps:,} steps",
                flush=True,
            )

    with StopRequest() as stop:
        path = add_guard(
            asked.policy, asked.out, asked.what, overwrite=asked.overwrite, replace=asked.replace, report=say,
            stop=lambda: stop.requested,
        )  # fmt: skip
    print(f"wrote {path} and {path.with_suffix('.json')}, risk {asked.what.risk:g}")
    print(f"evaluate it:  safeicrl evaluate {path}{import_options()}")
    return stop.exit_status
