"""A released policy with a guard that is fitted to it: `safeicrl fit-guard`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from safeicrl.agents.api import with_options
from safeicrl.agents.in_context import InContextAgent
from safeicrl.errors import UserError
from safeicrl.files import check_output
from safeicrl.machine.callbacks import own_errors
from safeicrl.optimisers.guard_fit import GuardFitConfig, GuardRound, fit_guard
from safeicrl.policies.cards import read_card, save_policy
from safeicrl.policies.catalogue import find_policy, load_agent
from safeicrl.policies.export import target_file
from safeicrl.provenance import surroundings

FITTED = " with a fitted guard"  # added to the policy's name: its results are not those of the policy alone
LIMIT = "its guard was fitted afterwards: the policy has not learned to act with it"
REPLACED = "its guard was fitted afterwards: the policy has learned to act with another one"


@own_errors()
def add_guard(
    name_or_path: str | Path,
    out: str | Path,
    config: GuardFitConfig,
    *,
    overwrite: bool = False,
    replace: bool = False,
    report: Callable[[GuardRound], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Path:
    """Fit a guard to a frozen policy and write both as one policy; returns the file's path.

    The evaluation on the old card was of the policy alone: the new card has none. The network's weights are the
    same, so switched off the guard changes nothing. A guard with which the policy was trained is thrown away only
    if `replace` says so. Where `stop` ends the fit after a round, what was learned so far is written, and the card
    says so.
    """
    target, source = target_file(Path(out), overwrite), find_policy(name_or_path)
    check_output(target)
    card = read_card(source)
    if card["kind"] != "net":
        raise UserError(f"a guard is for policies of kind 'net', {name_or_path} is of kind {card['kind']!r}")
    trained_with = bool(card["net"].get("guard")) and "guard_fit" not in card
    if trained_with and not replace:
        raise UserError(
            f"{name_or_path} has a guard, with which it was trained: replace=True (--replace) fits another one"
        )
    env, agent = load_agent(source, card)
    agent, _ = with_options(env, agent, temperature=card.get("temperature"))
    assert isinstance(agent, InContextAgent)
    done = 0

    def count(now: GuardRound) -> None:
        nonlocal done
        done = now.round
        if report is not None:
            report(now)

    fitted = fit_guard(env, agent, config, count, stop)
    kept = {key: value for key, value in card.items() if key != "evaluation"}
    net = {**card["net"], "guard": config.depth, "guard_clock": config.clock, "guard_ledger": config.ledger}
    where = surroundings()
    made = {key: where[key] for key in ("command", "date", "safeicrl")}
    about = {**dataclasses.asdict(config), "rounds_done": done, "temperature": agent.temperature, **made}
    limits = [limit for limit in card.get("limits", []) if limit not in (LIMIT, REPLACED)]
    limits.append(REPLACED if trained_with or REPLACED in card.get("limits", []) else LIMIT)
    name = f"{str(card.get('name') or source.stem).removesuffix(FITTED)}{FITTED}"
    new = {**kept, "name": name, "net": net, "risk": config.risk, "guard_fit": about, "limits": limits}
    save_policy(target, dataclasses.replace(fitted, risk=None), new)
    return target
