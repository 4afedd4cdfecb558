"""The house's rule that imports point one way, read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import safeicrl

SOURCE = Path(safeicrl.__file__).parent
# A room (a folder, or a file at the top) may import from itself and from the rooms before it.
# A new room gets its place here.
ROOMS = (
    ("errors", "version", "files", "log", "config", "budgets", "plugins", "machine"),
    ("envs", "provenance"),
    ("tokens",),
    ("nets",),
    ("agents",),
    ("trial", "returns"),
    ("penalty",),
    ("optimisers",),
    ("histories",),
    ("algos",),
    ("evaluation",),
    ("policies",),
    ("overlap",),
    ("training",),
    ("train",),
    ("recipes",),
    ("show",),
    ("cli", "__main__", "__init__"),
)
RANK = {name: rank for rank, rooms in enumerate(ROOMS) for name in rooms}


def imports_of(path: Path) -> set[str]:
    """Names under `safeicrl` that a file imports, anywhere in it, as dotted paths without the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("safeicrl.") for name in found if name.startswith("safeicrl.")}


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        relative = path.relative_to(SOURCE)
        found.append((".".join(relative.with_suffix("").parts), path))
    return found


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_point_one_way(name, path):
    room = name.split(".")[0]
    assert room in RANK, f"give {room} a layer in {Path(__file__).name}"
    for imported in imports_of(path):
        other = imported.split(".")[0]
        assert RANK[other] <= RANK[room], f"{name} imports {imported}"
        if room == "envs":
            assert other != "nets", f"{name} imports {imported}"
        if room == "nets":
            known = ("envs.api.", "envs.spaces.")
            assert other != "envs" or imported.startswith(known), f"{name} imports {imported}"


def test_there_are_no_circles():
    """Within a room too: no module imports, directly or through others, a module that imports it."""
    names = {name.removesuffix(".__init__"): path for name, path in modules()}
    ahead = {
        name: {known for i in imports_of(path) for known in (i, i.rpartition(".")[0]) if known in names}
        for name, path in names.items()
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " → ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in ahead[name] - {name}:
                visit(other, (*way, name))
            done.add(name)

    for name in names:
        visit(name, ())


def test_algorithms_never_import_each_other():
    algorithms = {name.split(".")[1] for name, _ in modules() if name.startswith("algos.")}
    algorithms -= {"__init__", "api", "registry"}
    for name, path in modules():
        if name.startswith("algos.") and name.split(".")[1] in algorithms:
            others = {i.split(".")[1] for i in imports_of(path) if i.startswith("algos.")} & algorithms
            assert others <= {name.split(".")[1]}, name


def test_only_the_face_imports_gymnasium():
    for name, path in modules():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        if any(imported.split(".")[0] == "gymnasium" for imported in names):
            assert name in (
                "envs.registry",
                "envs.gym",
                "envs.gym_vector",
                "envs.episode_cost",
                "envs.from_gymnasium",
            ), name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "envs.draw",
        "envs.registry",
        "evaluation.tables",
        "evaluation.plots",
        "show.films",
    ],
)
def test_reading_and_drawing_need_no_jax(name):
    module = f"safeicrl.{name}".rstrip(".")
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, f"{module} imports jax"


def test_type_checkers_see_every_public_name():
    """They read __all__ and the imports that never run; at run time a table finds the same names."""
    (block,) = (node for node in ast.parse((SOURCE / "__init__.py").read_text()).body if isinstance(node, ast.If))
    imported = {
        alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {name: f"safeicrl.{module}" for name, module in safeicrl._PUBLIC.items()}
    assert set(safeicrl.__all__) == {*imported, "__version__"}
    for name in safeicrl.__all__:
        assert getattr(safeicrl, name) is not None
    assert (SOURCE / "py.typed").exists()


def test_the_package_works_without_gymnasium():
    code = "import sys; sys.modules['gymnasium'] = None; import safeicrl.trial"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
