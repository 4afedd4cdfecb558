"""The documents are true: links lead somewhere, code runs, commands parse, the site has every page and module."""

import ast
import itertools
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import pytest

import safeicrl
from safeicrl.algos.registry import ALGOS
from safeicrl.cli import entry, evaluating, exporting, options, showing, training
from safeicrl.envs.registry import WORLDS
from safeicrl.policies import policy as policies
from safeicrl.policies.catalogue import find_policy

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs" / "site"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "results" / "README.md",
    *(ROOT / "docs").rglob("*.md"),
]
BY_NAME = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(PAGES)}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> dict[str, list[str]]:
    """Page → its code blocks in one language; pages without any are left out."""
    found = {
        name: [code for kind, code in FENCE.findall(text) if kind == language] for name, text in BY_NAME.items()
    }
    return {name: codes for name, codes in found.items() if codes}


# -- links ---------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as they are made where the repository is browsed and by the site."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", BY_NAME)
def test_links_lead_to_files_and_headings(name):
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", BY_NAME[name]))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), f"{name} links to {target}"
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{name} links to {target}"


def test_the_site_has_every_page_and_every_module():
    index = (SITE / "index.md").read_text(encoding="utf-8")
    entries = [line for line in index.splitlines() if re.fullmatch(r"[\w./*]+", line)]
    listed = {path.resolve() for entry in entries for path in SITE.glob(f"{entry}.md")}
    assert {path.resolve() for path in (ROOT / "docs").rglob("*.md")} <= listed | {SITE / "index.md"}

    documented = set(
        re.findall(r"automodule:: ([\w.]+)", "".join(p.read_text() for p in (SITE / "api").glob("*.md")))
    )
    sources = (path.relative_to(ROOT / "src").with_suffix("") for path in (ROOT / "src").rglob("*.py"))
    modules = {".".join(path.parts) for path in sources if not path.name.startswith("__")}
    inside = {m for m in modules if m.startswith(("safeicrl.show.", "safeicrl.cli.")) or m == "safeicrl.version"}
    assert documented == modules - inside  # the rest is reached by commands


def test_the_page_about_installing_names_every_extra():
    rows = re.findall(r"^\| (`.*?) \|", BY_NAME["docs/install.md"], re.MULTILINE)
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.search(r"\[project.optional-dependencies\]\n(.*?)\n\[", pyproject, re.DOTALL)[1]
    assert {x for row in rows for x in re.findall(r"`(\w+)`", row)} >= set(re.findall(r"^(\w+) =", extras, re.M))


def test_what_a_page_would_load_from_the_network_is_found():
    pytest.importorskip("sphinx")
    import runpy

    loaded = runpy.run_path(str(SITE / "conf.py"))["loaded"]
    assert loaded('<script src="https://cdn.example/x.js"></script>') == ["https://cdn.example/x.js"]
    assert loaded('<link rel="stylesheet" href="//fonts.example/a.css">') == ["//fonts.example/a.css"]
    assert loaded("@import url(https://fonts.example/b.css);") == ["https://fonts.example/b.css"]
    assert loaded('<a href="https://example.org">click</a> <img src="../one.png"> a.b{background:url(x.svg)}') == []


# -- Python --------------------------------------------------------------------------------------------------


class Rounds(ast.NodeTransformer):
    """Loops without an end for 5 rounds, long ones for 40: an episode of 30 steps ends in them."""

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        rounds = ast.parse("for _ in range(5): pass").body[0]
        rounds.body = node.body
        return rounds if isinstance(node.test, ast.Constant) and node.test.value is True else node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        match node.iter:
            case ast.Call(func=ast.Name(id="range"), args=[ast.Constant(value=int(count))]) if count > 40:
                node.iter.args[0] = ast.Constant(40)
        return node


class Bell(gymnasium.Env):
    """Stands in for a reader's environment: every step costs 1, the fifth is the last."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)
    spec = SimpleNamespace(max_episode_steps=5)


class Cart:
    """Stands in for gymnax's CartPole, which is an extra."""

    class Params(SimpleNamespace):
        def replace(self, **new):
            return {**vars(self), **new}

    default_params = Params(length=0.5, max_steps_in_episode=500)
    observation_space = staticmethod(lambda params: SimpleNamespace(low=-9.0, high=9.0, shape=(4,)))
    action_space = staticmethod(lambda params: SimpleNamespace(n=2))
    reset_env = step_env = is_truncated = staticmethod(lambda *arguments: None)


# Names that a page's blocks use and a reader's own program would have.
STANDINS = {
    "docs/deploy.md": {"observation": [4, 4], "reward": 0.0, "cost": 0.0, "terminated": False, "truncated": False},
    "docs/environments.md": {"env": safeicrl.make_env("safe-dark-room"), "split": "test", "action": 1},
    "docs/bring_your_own.md": {
        "make_env": lambda map: Bell(), "one": "A", "two": "B", "three": "C",
        "gymnax": SimpleNamespace(make=lambda name: (Cart(), Cart.default_params)),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def shared():
    """One compiled policy for all pages: that with a guard, which can do all that any page shows."""
    return policies.load_policy("safe-dark-room-guard")


@pytest.fixture
def tidy():
    """Forget what a block registers."""
    before = dict(WORLDS), dict(ALGOS)
    yield
    for registry, known in zip((WORLDS, ALGOS), before, strict=True):
        for name in set(registry) - set(known):
            del registry[name]


@pytest.mark.parametrize("name", blocks("python"))
def test_python_blocks_run(name, shared, tidy, monkeypatch, capsys):
    """In the order of the page, with the names of the blocks before."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(policies, "load_policy", lambda which, **options: find_policy(which) and shared)
    names = {"safeicrl": safeicrl, "jax": jax, "jnp": jnp, "key": jax.random.key(0), **STANDINS.get(name, {})}
    for code in blocks("python")[name]:
        tree = ast.fix_missing_locations(Rounds().visit(ast.parse(code)))
        exec(compile(tree, name, "exec"), names)
    if name == "docs/first_steps.md":
        assert "of 50 goals" in capsys.readouterr().out


# -- the shell -----------------------------------------------------------------------------------------------


def command_lines(code: str) -> list[list[str]]:
    """The simple commands of a block as words, variables and loops by their first value."""
    found, values = [], {}
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        words.whitespace_split = True
        for ends, part in itertools.groupby(words, lambda word: bool(re.fullmatch("[;&|]+", word))):
            command = [] if ends else [re.sub(r"\$(\w+)", lambda m: values[m[1]], word) for word in part]
            command = command[command[:1] == ["do"] :]
            if command[:1] == ["for"]:
                values[command[1]] = command[3]
            elif command and (assigned := re.fullmatch(r"(\w+)=(.*)", command[0])):
                values[assigned[1]] = assigned[2]
            elif command and command != ["done"]:
                found.append(command)
    return found


def test_shell_lines_are_taken_apart():
    code = "W=a/b\nfor s in 0 1; do safeicrl train --seed $s --out $W; done  # why\ncd x && safeicrl \\\n  list\n"
    assert command_lines(code) == [
        ["safeicrl", "train", "--seed", "0", "--out", "a/b"], ["cd", "x"], ["safeicrl", "list"],
    ]  # fmt: skip


class Begun(Exception):
    """The options are understood, and the work would begin."""


@pytest.fixture
def parser(tidy, monkeypatch):
    """The command line up to where work begins; a recipe's stages share its options, so one of them is parsed."""
    from safeicrl.recipes import presets, recipe

    def parse(command, form, args, real=options.parse):
        policy = getattr(real(command, form, args), "policy", None)
        if isinstance(policy, str) and "/" not in policy and not policy.isupper():
            find_policy(policy)
        raise Begun

    def load(folder, real=recipe.load_recipe):
        return presets.preset("darkroom-small", None) if folder.parts[0] == "runs" else real(folder)

    monkeypatch.chdir(ROOT)
    for module in (training, evaluating, exporting, showing):
        monkeypatch.setattr(module, "parse", parse)
    monkeypatch.setattr(entry, "keep_compiled", lambda: None)
    monkeypatch.setattr(entry.hosts, "supervise", lambda args: training.train(args[1:]))
    monkeypatch.setattr(recipe, "load_recipe", load)  # a preset stands in for the reader's own run

    def understand(args):
        try:
            entry._run(list(args))
        except Begun:
            return True
        except SystemExit as leaving:  # --help
            return not leaving.code
        return False

    return understand


@pytest.mark.parametrize("name", blocks("sh"))
def test_shell_blocks_are_understood(name, parser):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for code in blocks("sh")[name]:
        for program, *args in command_lines(code):
            if program == "safeicrl":
                assert parser(args), f"{name}: safeicrl {' '.join(args)}"
            elif program == "make":
                assert args[0] in targets, f"{name}: make {args[0]}"
            elif program == "python":
                assert (ROOT / args[0]).exists(), f"{name}: python {args[0]}"
            else:
                assert program in ("pip", "cd", "."), f"{name}: {program}"


def test_an_unknown_option_is_not_understood(parser):
    for line in (
        "evaluate safe-dark-rom",
        "train --preset darkroom --algo.rowz 3",
        "plot --fromat pdf x.npz",
    ):
        with pytest.raises(safeicrl.UserError):
            parser(line.split())
