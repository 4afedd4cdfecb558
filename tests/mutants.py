"""Deliberate faults: each is put into a copy of the repository, where the test that is about it must fail.

    make mutants                     all of them
    make mutants ONLY='budget'       those with this in their name

Not part of the tests. tests/test_mutants.py checks that every fault still fits the code.
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "results", "examples", "pyproject.toml")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault: in `file`, under src/safeicrl, the text `old` becomes `new`. `test`, under tests, must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def apply(self, root: Path) -> Callable[[], None]:
        """Put the fault into the copy at `root`; returns what takes it out again."""
        path = root / "src" / "safeicrl" / self.file
        before = path.read_bytes()
        path.write_text(self.changed(before.decode()))
        return lambda: path.write_bytes(before) and None

    def changed(self, text: str) -> str:
        """The text with the fault; refused unless it fits in exactly one place."""
        found = text.count(self.old)
        if found != 1:
            raise SystemExit(f"{self.name}: {self.file} has its old text {found} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclasses.dataclass(frozen=True)
class Noise:
    """The weights of a shipped policy in disorder, with digests that fit."""

    policy: str

    @property
    def name(self) -> str:
        """As in the list."""
        return f"noise for weights: {self.policy}"

    @property
    def test(self) -> str:
        """That plays the policy."""
        return f"test_shipped.py::test_a_shipped_policy_does_what_its_stored_evaluation_says[{self.policy}]"

    def apply(self, root: Path) -> Callable[[], None]:
        """Put the fault into the copy at `root`; returns what takes it out again."""
        folder = root / "src" / "safeicrl" / "policies" / "pretrained"
        files = [folder / f"{self.policy}{ending}" for ending in (".safetensors", ".json")]
        before = [file.read_bytes() for file in files]
        code = (
            "import sys; sys.path.insert(0, 'tests'); from pathlib import Path; from test_shipped import shuffled\n"
            "from safeicrl.policies import cards, catalogue\n"
            "path = catalogue.PRETRAINED / f'{sys.argv[1]}.safetensors'; card = cards.read_card(path)\n"
            "cards.save_policy(path, shuffled(catalogue.load_agent(path, card)[1]), card)"
        )
        subprocess.run([sys.executable, "-c", code, self.policy], cwd=root, env=environment(root), check=True)
        return lambda: [file.write_bytes(data) for file, data in zip(files, before, strict=True)] and None


UNNOTICED = "test_unnoticed.py::test_"
COSTS = "test_costs.py::test_"
OVER = f"{UNNOTICED}a_budget_that_is_spent_exactly_is_kept"
KEYS = f"{UNNOTICED}evaluation_plays_unseen_tasks_with_keys_of_their_own"
SPEED = f"{UNNOTICED}speed_limits_are_safety_gymnasiums"
LIMITED = f"{UNNOTICED}what_is_limited_is_the_ants_speed_and_the_cheetahs_forward_velocity"
PRICE = f"{UNNOTICED}both_optimisers_charge_the_price"
LAMBDA = f"{UNNOTICED}the_optimiser_gets_the_new_multiplier_whose_step_grows_over_the_run"
SLOW = f"{UNNOTICED}slow_heads_follow_at_their_rate_in_the_units_of_the_fast_ones"
SCORE = f"{UNNOTICED}a_score_counts_every_task_once_and_the_last_five_episodes"
COMPARED = f"{UNNOTICED}only_results_on_the_same_tasks_and_budgets_are_compared"
FLUSHED = "test_files.py::test_the_folder_is_flushed_after_the_rename"
FOUND = "test_sound.py::test_any_bad_number_is_found_with_its_place"
SHIPPED = ("safe-dark-room", "safe-dark-car", "safe-velocity-half-cheetah", "safe-velocity-ant")
AGAIN = "test_settled.py::test_the_last_episode_is_played_again_and_again"
KEPT = "test_settled.py::test_an_episode_is_kept_if_it_is_much_better_or_broke_the_budget"
SWEPT = "test_files.py::test_temporary_files_of_dead_processes_are_removed"

PAID = "test_ledger.py::test_it_finds_what_was_paid_where_the_agent_was"
BLOCKS = "test_ledger.py::test_rows_are_looked_up_in_blocks"
CELLS = "test_ledger.py::test_a_memory_knows_the_cells_as_its_slots_do"
BOTH_WAYS = "test_ledger.py::test_rows_and_single_steps_find_the_same"

MUTANTS: tuple[Mutant | Noise, ...] = (
    # what is remembered past K
    Mutant("a memory that never settles", "agents/settled.py", "> last) & within", "> 99) & within", AGAIN),
    Mutant("a broken budget is forgotten", "agents/settled.py", "& within & ~better", "& ~better", KEPT),
    Mutant(
        "the best return counts broken budgets", "agents/settled.py", "jnp.where(ended & within, ",
        "jnp.where(ended, ", KEPT,
    ),
    Mutant(
        "a memory without room for what it keeps", "agents/in_context.py", "SPARE * trunk.spec.max_steps if",
        "0 if", "test_settled.py::test_kept_episodes_find_room_beside_those_of_training",
    ),
    Mutant(
        "a memory that settles after K episodes only", "agents/in_context.py", "if self.settles and self.settle_",
        "if False and self.settle_", "test_settled.py::test_a_memory_may_settle_before_k",
    ),
    # a reserve
    Mutant(
        "a reserve before the first cost", "agents/reserved.py", "left < budget", "left <= budget",
        "test_reserve.py::test_it_is_kept_once_an_episode_has_cost_something",
    ),
    Mutant(
        "a reserve of the last episode's budget", "agents/reserved.py", "token.ctg, held.budget)",
        "held.budget, held.budget)", "test_reserve.py::test_it_is_kept_once_an_episode_has_cost_something",
    ),
    Mutant(
        "a guard that keeps the reserve, too", "agents/in_context.py", "guard.judge(watched, token.ctg, ",
        "guard.judge(watched, token.ctg - self.reserve, ",
        "test_reserve.py::test_the_guard_judges_by_what_is_really_left",
    ),
    Mutant(
        "a reserve of larger budgets, once they have become small", "agents/reserved.py", "budget < below, amount",
        "left < below, amount", "test_reserve.py::test_of_small_budgets_it_is_kept_from_the_first_step_on",
    ),
    Mutant(
        "no reserve of other budgets", "budgets.py", "others[0] if others else 0.0", "0.0",
        "test_reserve.py::test_other_budgets_may_have_a_reserve_of_their_own",
    ),
    # policies that share arrays
    Mutant(
        "a copy that still shares another policy's arrays", "policies/cards.py", 'if key != "arrays"}', "if key}",
        "test_policy.py::test_a_card_may_share_the_arrays_of_the_policy_beside_it",
    ),
    # a brake
    Mutant(
        "a brake at the start of an episode", "agents/brake.py", " & ~token.start", "",
        "test_brake.py::test_it_acts_harder_where_a_cost_has_used_the_budget_up",
    ),
    Mutant(
        "a brake while some of the budget is left", "agents/brake.py",
        " & is_spent(token.ctg, spec.cost_unit)", "",
        "test_brake.py::test_it_acts_harder_where_a_cost_has_used_the_budget_up",
    ),
    Mutant(
        "a graph without a brake", "policies/onnx.py", "if self.agent.brake != 1:", "if False:",
        "test_onnx.py::test_the_runner_acts_as_the_policy_through_whole_trials[a brake]",
    ),
    # the guard's ledger
    Mutant(
        "nobody paid for the cell an episode begins in", "nets/ledger.py", "known = ~token.start",
        "known = ~token.first", PAID,
    ),
    Mutant(
        "a ledger of other trials", "nets/ledger.py", " & (cut(trial)[..., None] == trial[:, None, :])", "",
        BOTH_WAYS,
    ),
    Mutant(
        "a fit guesses what follows a span of the ledger's", "optimisers/guard_fit.py", "    known &= done |",
        "    done |",
        "test_ledger.py::test_a_fit_does_not_learn_from_a_span_s_last_step_whose_future_it_does_not_see",
    ),
    Mutant("a ledger without an end", "nets/ledger.py", " & (age < context)", "", BOTH_WAYS),
    Mutant("a block that forgets where it begins", "nets/ledger.py", "begin=begin - first", "begin=0", BLOCKS),
    Mutant("cells keep what was overwritten", "nets/ledger.py", " - self._added(gone)", "", CELLS),
    Mutant("cells of a memory before it was taken back", "nets/ledger.py", "if not again:", "if True:", CELLS),
    Mutant("cells of the trial before", "nets/heads.py", "jnp.where(fresh[:, None, None], 0.0, ", "(", BOTH_WAYS),
    Mutant("cells of other trials", "nets/ledger.py", "jnp.maximum(began, time", "jnp.maximum(0, time", BOTH_WAYS),
    Mutant("cells without an end", "nets/ledger.py", "time - context + 1)[", "0)[", BOTH_WAYS),
    # what over budget means, and on which tasks it is measured
    Mutant("over budget by ≥", "budgets.py", "cost > budget * (1", "cost >= budget * (1", OVER),
    Mutant("over budget without slack", "budgets.py", "budget * (1 + 1e-6) + 1e-6", "budget", OVER),
    Mutant(
        "budget rounded without slack", "tokens.py", "spec.cost_unit + 1e-4)", "spec.cost_unit)",
        f"{UNNOTICED}a_budget_of_whole_units_keeps_all_of_them",
    ),
    Mutant(
        "evaluation on training tasks", "evaluation/evaluate.py", 'split: Split = "test"', 'split: Split = "train"',
        KEYS,
    ),
    Mutant(
        "evaluation ignores its split", "evaluation/evaluate.py", "sample_tasks(env, check_split(split),",
        'sample_tasks(env, "train",', KEYS,
    ),
    Mutant(
        "task key as run key", "evaluation/evaluate.py", "evaluation_keys(seed)[1]",
        "evaluation_keys(seed)[0]", KEYS,
    ),
    Mutant(
        "all chunks share one key", "evaluation/evaluate.py", "jax.random.fold_in(run_key, chunk)",
        "jax.random.fold_in(run_key, 0)", KEYS,
    ),
    Mutant(
        "baselines not wiped in training's evaluation", "training/best.py", "wipe=options.wipe)", "wipe=False)",
        f"{UNNOTICED}a_baseline_is_wiped_in_its_evaluation",
    ),
    # several costs
    Mutant(
        "over budget only if all costs are", "budgets.py", "over.any(-1) if several", "over.all(-1) if several",
        f"{COSTS}over_budget_is_any_cost_over_its_own",
    ),
    Mutant(
        "penalty of the first cost only", "penalty.py", "return beyond.sum(-1)", "return beyond[..., 0]",
        f"{COSTS}tokens_and_penalties_of_random_play",
    ),
    Mutant(
        "λ by the mean over costs", "trial.py", "self.excess.max(-1) if", "self.excess.mean(-1) if",
        f"{COSTS}every_signal_takes_the_largest_over_costs",
    ),
    Mutant(
        "budgets of all costs rise together", "evaluation/evaluate.py", "permutation(order) if index",
        "choice(1) + order if index", f"{COSTS}results_by_cost",
    ),
    Mutant(
        "fallback only when all budgets are used up", "budgets.py", "return spent.any(-1) if several",
        "return spent.all(-1) if several", f"{COSTS}a_policy_takes_a_budget_for_each_cost",
    ),
    # worlds
    Mutant("other held-out speed limits", "envs/safe_velocity.py", "(0.60, 0.75, ", "(0.65, 0.75, ", SPEED),
    Mutant("cheetah's limit off by 3%", "envs/safe_velocity.py", "3.2096", "3.3059", SPEED),
    Mutant("ant's limit off by 3%", "envs/safe_velocity.py", "2.6222", "2.5435", SPEED),
    Mutant(
        "ant's limit on forward velocity", "envs/safe_velocity.py", "return velocity[0], jnp.linalg.norm(velocity)",
        "return velocity[0], velocity[0]", LIMITED,
    ),
    Mutant(
        "cheetah's limit on |v|", "envs/safe_velocity.py", "return forward, forward",
        "return forward, jnp.abs(forward)", LIMITED,
    ),
    Mutant(
        "hazards drawn uniformly", "envs/dark_mujoco.py", "points = self._propose(key, cdf)",
        "points = self._propose(key, jnp.where(index > 1, jnp.linspace(0, 1, cdf.size), cdf))",
        f"{UNNOTICED}hazards_follow_the_split_too",
    ),
    # learning
    Mutant(
        "price ignored by PPO", "optimisers/ppo.py", "jnp.stack([net_reward(trials, self.penalty) + bonus, cost])",
        "jnp.stack([trials.reward + bonus, cost])", PRICE,
    ),
    Mutant(
        "price ignored by DDPG", "optimisers/ddpg.py", "jnp.stack([net_reward(trials, self.penalty), cost])",
        "jnp.stack([trials.reward, cost])", PRICE,
    ),
    Mutant("final_step ignored", "penalty.py", "config.step) * progress", "config.step) * 0", LAMBDA),
    Mutant(
        "λ's step never told the progress", "algos/scared.py", "self.config.penalty, self.progress(state)\n",
        "self.config.penalty, 0.0\n", LAMBDA,
    ),
    Mutant(
        "old λ for the optimiser", "algos/scared.py", "trials, tasks, self.per_episode(multiplier),",
        "trials, tasks, self.per_episode(state.multiplier),", LAMBDA,
    ),
    Mutant(
        "entropy schedule frozen", "optimisers/ppo.py", "self.config.entropy[0] + progress *",
        "self.config.entropy[0] + 0 *", f"{UNNOTICED}ppos_entropy_fades_over_the_run",
    ),
    Mutant(
        "warm-up dropped", "optimisers/ppo.py", "optax.linear_schedule(0.0, begin, warm)",
        "optax.linear_schedule(begin, begin, warm)", f"{UNNOTICED}ppos_learning_rate_rises_then_falls",
    ),
    Mutant(
        "spent budgets drawn per trial", "algos/scared.py", "each = (*shape, self.episodes,",
        "each = (*shape, 1,", f"{UNNOTICED}overspent_episodes_are_drawn_one_by_one",
    ),
    Mutant(
        "slow heads not rescaled", "optimisers/ddpg.py",
        "slow, scale = _in_new_units(slow, scale / new_scale), new_scale", "slow, scale = slow, new_scale", SLOW,
    ),
    Mutant("target rate 1", "optimisers/ddpg.py", "slow, self.config.target_rate)", "slow, 1.0)", SLOW),
    Mutant(
        "PPO-Lagrangian without PopArt", "optimisers/lagrangian.py",
        "params=rescale(state.params, state.scale / scale)", "params=state.params",
        f"{UNNOTICED}a_safe_learners_values_stay_when_their_scale_moves",
    ),
    # scores
    Mutant(
        "score's error not clustered", "evaluation/statistics.py",
        "standard_error(gained - score * range_, results.task)", "standard_error(gained - score * range_)", SCORE,
    ),
    Mutant(
        "score over all episodes", "evaluation/statistics.py",
        "r.returns[:, -last:].mean(axis=1) for r in (results, upper, lower)",
        "r.returns.mean(axis=1) for r in (results, upper, lower)", SCORE,
    ),
    Mutant(
        "score's costs over all episodes", "evaluation/statistics.py",
        "last_return=float(mine.mean()),\n        over_budget_last=float(results.over[:, -last:].mean())",
        "last_return=float(mine.mean()),\n        over_budget_last=float(results.over.mean())",
        f"{UNNOTICED}costs_of_the_last_episodes_only_are_compared",
    ),
    Mutant(
        "compare without its split check", "evaluation/statistics.py",
        '    "split": lambda r: r.meta.get("split"),\n', "", COMPARED,
    ),
    Mutant(
        "compare without its budget check", "evaluation/statistics.py",
        "if not np.array_equal(one.budgets, other.budgets):", "if False:", COMPARED,
    ),
    # numbers that count as safe
    Mutant("nan counts as sound", "errors.py", "return (values >=", "return ~(values <= 0) | (values >=", FOUND),
    Mutant("negative costs count", "errors.py", '(0.0 if name == "cost" else -LARGEST)', "-LARGEST", FOUND),
    Mutant(
        "costs above the largest pass", "envs/faults.py", "values <= spec.max_cost * (1 + SLACK)", "True",
        "test_sound.py::test_what_a_spec_promises_is_looked_at",
    ),
    Mutant(
        "episodes may last for ever", "envs/faults.py", "age >= spec.max_steps", "age < 0",
        "test_sound.py::test_an_episode_that_does_not_end_is_found",
    ),
    Mutant(
        "JAX's error about a callback's", "machine/callbacks.py", "if found is None:", "if True:",
        "test_from_gymnasium.py::test_training_says_it_too",
    ),
    Mutant(
        "SCARED reports no fault", "algos/scared.py",
        '"fault": first_fault(trials, self.env.spec)', '"fault": jnp.full(5, -1.0)',
        "test_sound.py::test_scared_reports_what_it_played",
    ),
    Mutant(
        "training goes on after a fault", "train.py",
        "            _refuse_faults(faults, status, config, self.algorithm.env)\n", "",
        "test_sound.py::test_training_refuses_a_negative_cost_and_keeps_what_it_had",
    ),
    Mutant(
        "training learns from a negative cost", "training/steps.py",
        "    finite &= fault[0] == NONE", "    finite &= True",
        "test_sound.py::test_training_refuses_a_negative_cost_and_keeps_what_it_had",
    ),
    Mutant(
        "evaluation ignores a fault", "evaluation/evaluate.py", "np.asarray(found)", "np.full(5, -1.0)",
        "test_sound.py::test_evaluation_refuses_a_nan_cost",
    ),
    Mutant(
        "results may hold nan", "evaluation/results.py", "np.isfinite(values) & (values >= low)", "~(values < low)",
        "test_sound.py::test_results_with_impossible_numbers_are_refused",
    ),
    Mutant("seeds wrap", "errors.py", "0 <= value < 2**32", "0 <= value", "test_sound.py::test_seeds_do_not_wrap"),
    # files
    Mutant("folder not flushed", "files.py", "            sync_folder(path.parent)", "            pass", FLUSHED),
    Mutant("policy's folder not flushed", "policies/cards.py", "    sync_folder(path.parent)", "    pass", FLUSHED),
    Mutant(
        "two runs in one folder", "train.py", "stack.enter_context(owned(folder))", "pass",
        "test_files.py::test_a_folder_has_one_owner",
    ),
    Mutant(
        "another host's lock ignored", "files.py", "if free is False or elsewhere or", "if free is False or",
        "test_files.py::test_a_lock_of_another_host_counts_until_it_is_deleted",
    ),
    Mutant("living processes' files removed", "files.py", "or not _alive(process)", "or True", SWEPT),
    Mutant(
        "checkpoint before its log", "train.py", "            sink.sync()\n", "            pass\n",
        "test_files.py::test_the_log_is_on_the_disk_before_the_checkpoint_that_counts_on_it",
    ),
    Mutant(
        "evaluation logged twice", "log.py", "        return evaluated == keep_until\n", "        return True\n",
        "test_files.py::test_a_resumed_log_keeps_what_its_checkpoint_knows",
    ),
    Mutant(
        "no save before the last evaluation", "train.py",
        "        self.save(state)  # before the evaluation, which may fail\n", "",
        "test_files.py::test_the_log_is_on_the_disk_before_the_checkpoint_that_counts_on_it",
    ),
    Mutant(
        "a card's digest is not compared", "policies/cards.py", 'digests.get("card") != _digest(card)', "False",
        "test_files.py::test_a_flipped_bit_anywhere_in_a_card_is_noticed",
    ),
    Mutant(
        "a stop looks like the end", "cli/training.py", "stop.exit_status\n\n\ndef _with", "0\n\n\ndef _with",
        "test_files.py::test_a_stop_by_signal_has_its_own_exit_status",
    ),
    Mutant(
        "ignored signals are heard", "machine/signals.py",
        "if signal.getsignal(number) is not signal.SIG_IGN", "if True",
        "test_train.py::test_an_ignored_signal_stays_ignored",
    ),
    # several devices and processes
    Mutant(
        "rows are not divided", "machine/devices.py", "return _constrained(tree, P(ROWS))", "return tree",
        "test_devices.py::test_a_minibatch_is_drawn_from_all_rows_and_divided_again",
    ),
    Mutant(
        "rows added for the devices are kept", "evaluation/evaluate.py", "np.asarray(x)[:rows]", "np.asarray(x)",
        "test_devices.py::test_an_evaluation_does_not_depend_on_the_devices_even_if_its_rows_cannot_be_divided",
    ),
    Mutant(
        "worlds of the first device only", "machine/devices.py", "or len(worlds) % mesh.size:", "or True:",
        "test_devices.py::test_each_device_has_its_own_worlds_moved",
    ),
    Mutant(
        "a lost process is not explained", "machine/hosts.py", "if fatal or code == LOST:", "if code is None:",
        "test_devices.py::test_a_lost_process_ends_the_run_which_then_goes_on",
    ),
    # sweeps
    Mutant(
        "a sweep begins a killed run anew", "recipes/sweep.py", "if _begun(task.folder) else", "if False else",
        "test_sweep.py::test_an_interrupted_sweep_stops_and_goes_on_where_it_was",
    ),
    Mutant(
        "a sweep repeats what is finished", "recipes/sweep.py", "if run.name not in finished", "if True",
        "test_sweep.py::test_a_failed_run_is_named_and_the_others_go_on_and_finished_ones_are_skipped",
    ),
    Mutant(
        "a stopped run of a sweep counts as failed", "recipes/sweep.py", "code >= 128", "code >= 256",
        "test_sweep.py::test_an_interrupted_sweep_stops_and_goes_on_where_it_was",
    ),
    # what ships
    *(Noise(name) for name in SHIPPED),
)  # fmt: skip


def environment(root: Path) -> dict[str, str]:
    """Of a process that is to use the copy at `root`, with the compiled programs of the tests."""
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    return {**os.environ, "PYTHONPATH": str(root / "src"), "JAX_COMPILATION_CACHE_DIR": cache}


def caught(mutant: Mutant | Noise, root: Path) -> bool:
    """Whether the fault's test fails in the copy; an error outside of the test counts as not caught."""
    undo = mutant.apply(root)
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{mutant.test}"]
        ran = subprocess.run(command, cwd=root, env=environment(root), capture_output=True, text=True, check=False)
    finally:
        undo()
    if ran.returncode not in (0, 1):  # no such test, or pytest itself failed
        print(ran.stdout[-2000:], ran.stderr[-2000:], sep="\n")
        raise SystemExit(f"{mutant.name}: {mutant.test} cannot be run")
    return ran.returncode == 1


def main() -> int:
    """Put in the faults one by one; the number of those that no test caught."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("only", nargs="?", default="", help="part of the names of the faults to put in")
    chosen = [mutant for mutant in MUTANTS if parser.parse_args().only in mutant.name]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        for mutant in chosen:
            begin = time.monotonic()
            found = caught(mutant, Path(folder))
            word = "caught " if found else "MISSED "
            print(f"{word}{mutant.name:48} {time.monotonic() - begin:5.1f} s  {mutant.test}", flush=True)
            missed += [] if found else [mutant.name]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults are caught")
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
