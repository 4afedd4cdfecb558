"""The report as one HTML page that needs nothing else: styles and images are inside it."""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safeicrl.files import atomic_write
from safeicrl.show.report.content import Drawing, Found, Grid, Panel, Part, Shown

DPI = 110
TITLE = "Safe In-Context Reinforcement Learning: the report"

STYLE = """
:root { --ground: #fbfbfa; --text: #22252b; --faint: #667; --rule: #dcdce2; --card: #fff; --link: #0b5c9c;
  --missing: #fff4dc; --missing-rule: #d59a20; --code: #f0f0f3; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181d; --text: #e4e6ea; --faint: #9aa1ad; --rule: #343943;
  --card: #1e2128; --link: #7fbcf0; --missing: #33290f; --missing-rule: #b9892b; --code: #262a33; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); font: 16px/1.55 system-ui, sans-serif; }
.frame { display: grid; grid-template-columns: 15rem minmax(0, 1fr); max-width: 78rem; margin: 0 auto; gap: 2rem;
  padding: 0 1.2rem 4rem; }
nav { position: sticky; top: 0; align-self: start; max-height: 100vh; overflow: auto; padding: 1.6rem 0;
  font-size: .88rem; }
nav ol { list-style: none; margin: 0; padding: 0; } nav ol ol { padding-left: .9rem; }
nav a { display: block; padding: .12rem 0; text-decoration: none; } nav ol ol a { color: var(--faint); }
a { color: var(--link); }
h1 { font-size: 1.7rem; margin: 1.6rem 0 .4rem; } h2 { margin: 3rem 0 .4rem; border-top: 2px solid var(--rule);
  padding-top: 1.4rem; font-size: 1.35rem; } h3 { margin: 2rem 0 .5rem; font-size: 1.05rem; }
.lead, .note { color: var(--faint); max-width: 46rem; } .note { font-size: .9rem; }
img { display: block; max-width: 100%; height: auto; background: #fff; border: 1px solid var(--rule);
  border-radius: 6px; padding: .3rem; margin: .8rem 0; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--faint); padding-bottom: .25rem; }
th, td { padding: .28rem .7rem .28rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule); }
th { font-weight: 600; vertical-align: bottom; } td:first-child { font-weight: 500; }
.missing { background: var(--missing); border-left: 4px solid var(--missing-rule); padding: .5rem .9rem;
  margin: .8rem 0; border-radius: 0 6px 6px 0; font-size: .9rem; }
pre { background: var(--code); padding: .5rem .7rem; border-radius: 5px; overflow-x: auto; font-size: .8rem;
  margin: .3rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .6rem 0; font-size: .88rem; } summary { cursor: pointer; color: var(--faint); }
@media (max-width: 50rem) { .frame { display: block; } nav { position: static; max-height: none; } }
@media print { nav { display: none; } .frame { display: block; } }
"""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a panel as it came out."""

    part: Part
    found: Found
    shown: list[Shown]


def write_page(sections: Sequence[tuple[int, Panel, list[Section]]], about: Sequence[str], out: Path) -> Path:
    """Write the page and, beside it, its figures; returns the page's path.

    `sections` has each panel's number, the panel and its parts. `about` are the lines below the title.
    """
    contents, body = [], []
    for number, panel, parts in sections:
        inner = "".join(f'<li><a href="#{s.part.name}">{_text(s.part.title)}</a></li>' for s in parts)
        contents.append(f'<li><a href="#{panel.name}">{number}. {_text(panel.title)}</a><ol>{inner}</ol></li>')
        body.append(
            f'<h2 id="{panel.name}">{number}. {_text(panel.title)}</h2><p class="lead">{_text(panel.text)}</p>'
        )
        body.append(f"<pre>{_text(panel.command or f'safeicrl reproduce {panel.name}')}</pre>")
        body += [_section(section, out) for section in parts]
    lead = "".join(f'<p class="lead">{_text(line)}</p>' for line in about)
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{TITLE}</title><style>{STYLE}</style></head><body>"
        f'<div class="frame"><nav aria-label="Contents"><ol>{"".join(contents)}</ol></nav><main>'
        f"<h1>{TITLE}</h1>{lead}{''.join(body)}</main></div></body></html>\n"
    )
    path = out / "index.html"
    atomic_write(path, [page.encode()])
    return path


def _section(section: Section, out: Path) -> str:
    part, found = section.part, section.found
    pieces = [f'<h3 id="{part.name}">{_text(part.title)}</h3>']
    for number, item in enumerate(section.shown):
        name = part.name if number == 0 else f"{part.name}-{number + 1}"
        pieces.append(_shown(item, out / "figures" / f"{name}.png"))
    for need in found.missing:
        files = _text(" or ".join(need.files))
        pieces.append(
            f'<div class="missing"><strong>Missing: {_text(need.label)}.</strong> There is no '
            f"{files} in the results. This would make it:<pre>{_text(need.command)}</pre></div>"
        )
    if found.files:
        pieces.append(_origin(found))
    return f"<section>{''.join(pieces)}</section>"


def _origin(found: Found) -> str:
    """Where a part comes from: files, seeds, the recorded commands."""
    rows = []
    for label, files in found.files.items():
        for file in files:
            command = file.command or "not recorded"
            rows.append([label, str(file.path), file.seed, command])
    grid = _grid(Grid(header=("", "data file", "seeds", "command"), rows=rows))
    return f"<details><summary>Data, seeds and commands</summary>{grid}</details>"


def _shown(item: Shown, path: Path) -> str:
    if isinstance(item, str):
        return f'<p class="note">{_text(item)}</p>'
    if isinstance(item, Grid):
        return _grid(item)
    return _image(item, path)


def _image(drawing: Drawing, path: Path) -> str:
    buffer = io.BytesIO()
    drawing.figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    atomic_write(path, [buffer.getbuffer()])
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(drawing.text)}" src="data:image/png;base64,{data}">'


def _grid(grid: Grid) -> str:
    caption = f"<caption>{_text(grid.title)}</caption>" if grid.title else ""
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in grid.header)
    rows = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in grid.rows)
    return f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _text(text: str) -> str:
    return html.escape(text, quote=False)
