"""`safeicrl reproduce`: find or make what the figures need, draw them, write the report."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from safeicrl.errors import UserError, unknown_name
from safeicrl.evaluation.sweeps import is_sweep
from safeicrl.files import make_folder
from safeicrl.show.report.content import Panel, find
from safeicrl.show.report.jobs import SIZES, jobs, run_jobs
from safeicrl.show.report.page import Section, write_page
from safeicrl.show.report.panels import PANELS
from safeicrl.show.report.sweep import sweep_panels
from safeicrl.version import VERSION

Scale = Literal["smoke", "laptop", "paper"]


def reproduce(
    figure: str | None, *, scale: Scale, out: Path, results: Path, say: Callable[[str], None] = print
) -> tuple[Path, list[str]]:
    """Write the report of one figure or of all; returns the page and the names of the parts that miss something.

    At the paper's scale it draws what is stored in `results`, which may be a sweep's folder. At the smaller scales
    it first trains and evaluates into `out`/runs, and draws from there; `say` hears of every command that is
    finished.
    """
    swept = scale == "paper" and is_sweep(results)
    panels = sweep_panels(results) if swept else PANELS
    names = [panel.name for panel in panels]
    if figure is not None and figure not in names:
        raise unknown_name("figure", figure, names)
    if scale == "paper" and not results.is_dir():
        raise UserError(f"no results folder at {results}: run this in the repository, or name it with --results")
    make_folder(out)
    if scale != "paper":
        folder = (out / "runs" / scale).absolute()
        asked = [job for job in jobs(scale, folder) if figure is None or figure in job.panels]
        run_jobs(asked, folder, say, SIZES[scale].compiler)
        how = (
            f"safeicrl {VERSION}, scale {scale}: everything was trained and evaluated anew, in a 5×5 room and in "
            f"short trials of the robots, below {out / 'runs' / scale}. It shows that every pipeline works, and "
            "nothing about how good a method is."
        )
        return build(figure, root=folder, about=[*ABOUT, how], out=out)
    if swept:
        about = [f"safeicrl {VERSION}, the sweep in {results}.", MEANS]
        return build(figure, root=results, about=about, out=out, panels=panels)
    about = [f"safeicrl {VERSION}, scale {scale}, from the files below {results}."]
    return build(figure, root=results, about=[*ABOUT, *about], out=out)


def build(
    figure: str | None, *, root: Path, about: Sequence[str], out: Path, panels: Sequence[Panel] = PANELS
) -> tuple[Path, list[str]]:
    """Draw the panels from the files below `root`; see `reproduce`."""
    sections, missing = [], []
    for number, panel in enumerate(panels, 1):
        if figure not in (None, panel.name):
            continue
        parts = []
        for part in panel.parts:
            found = find(part, root)
            shown = part.show(found) if found.files or not part.needs else []
            parts.append(Section(part=part, found=found, shown=shown))
            if found.missing:
                missing.append(part.name)
        sections.append((number, panel, parts))
    return write_page(sections, about, out), missing


MEANS = "Lines are means. Bands and ± are standard errors: over seeds where there are several, else over tasks."
ABOUT = (
    "The paper's figures and tables, made by this code. A frozen policy learns unseen tasks from its own history, "
    "under a budget on the cost of every episode. What has not been trained or evaluated is marked as missing, "
    "with the command that would make it.",
    f"{MEANS} docs/results.md says claim by claim what agrees with the paper and what does not.",
)
