"""The documentation site: `make docs` builds it, offline, from the Markdown of the repository and the docstrings.

The source folder is the root of the repository, so that pages link to each other and to its files as they do where
the repository is browsed. A link to a file that is not a page becomes a copy of that file in the site.
"""

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms.post_transforms import SphinxPostTransform

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))  # the docstrings of this checkout, whatever is installed
os.environ.setdefault("JAX_PLATFORMS", "cpu")

project = "safeicrl"
author = "The safeicrl developers"
release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
root_doc = "docs/site/index"
include_patterns = ["docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md"]
myst_heading_anchors = 3
myst_links_external_new_tab = True

default_role = "code"  # docstrings write `name` for code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = "safeicrl"
html_extra_path = ["redirect"]  # the site's index.html
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"footer_icons": []}

# What a page loads by itself: not the links that a reader may click.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|link)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|(?:url\(|@import\s+)["']?((?:https?:)?//[^"')\s]+)"""
)


def loaded(text: str) -> list[str]:
    """The addresses that a page or a style sheet loads from the network."""
    return [one or other for one, other in LOADED.findall(text)]


def check_offline(app: Sphinx, error: Exception | None) -> None:
    """Fail if a built page would load anything from the network."""
    if error is not None or app.builder.format != "html":
        return
    files = [file for file in Path(app.outdir).rglob("*") if file.suffix in (".html", ".css")]
    found = {file: addresses for file in files if (addresses := loaded(file.read_text(encoding="utf-8")))}
    for file, addresses in found.items():
        raise ExtensionError(f"{file} would load {addresses[0]} from the network")


class FolderLinks(SphinxPostTransform):
    """A link to a folder of the repository opens, in the site, the nearest README.md above the folder."""

    default_priority = 8  # before MyST says that it knows no such page

    def run(self, **kwargs: Any) -> None:
        """Resolve the page's links to folders."""
        here = (ROOT / self.env.docname).parent
        for node in list(self.document.findall(pending_xref)):
            folder = Path(os.path.normpath(here / node.get("reftarget", "")))
            if node.get("reftype") == "myst" and folder.is_relative_to(ROOT) and folder.is_dir():
                names = (
                    (place / "README").relative_to(ROOT).as_posix() for place in (folder, *folder.parents[:-1])
                )
                page = next(name for name in names if name in self.env.all_docs)  # at last that of the root
                address = self.app.builder.get_relative_uri(self.env.docname, page)
                link = nodes.reference("", "", *node.children, internal=True, refuri=address)
                node.replace_self(link)


def as_markup(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings as reStructuredText: indented blocks keep their lines, `[*shape]` is no emphasis."""
    found: list[str] = []
    inside = False
    for line in lines:
        if line and not line.startswith(" "):
            inside = False
        elif line and not inside and (not found or not found[-1]):
            inside = True
            found += ["::", ""]
        alone = line.count("*") == 1 and not line.startswith("* ")
        found.append(line.replace("*", r"\*") if alone and not inside else line)
    lines[:] = found


def only_what_exists(app: Sphinx, page: str, content: list[str]) -> None:
    """Leave the page of results out of the index where it is not written yet."""
    if page == root_doc and not (ROOT / "docs" / "results.md").exists():
        content[0] = content[0].replace("\n../results\n", "\n")


def setup(app: Sphinx) -> None:
    """Connect what this file adds to Sphinx."""
    app.add_post_transform(FolderLinks)
    app.connect("source-read", only_what_exists)
    app.connect("autodoc-process-docstring", as_markup)
    app.connect("build-finished", check_offline)
