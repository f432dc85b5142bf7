"""Links of the Markdown pages on the site: to tutorials instead of scripts, and from names to the reference."""

import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import equipoise as eq

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!#|[a-z]+:)([^)#\s]+)\)")


def rewrite(app: Sphinx, name: str, source: list[str]) -> None:
    """Let links to scripts of tutorials lead to the tutorials, and links to folders to a file in them."""
    folder = (ROOT / name).parent

    def target(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        if path.is_dir():
            page = ROOT / "docs" / "tutorials" / "index.rst"
            path = page if path == ROOT / "examples" else next(path.glob("*.toml"))
        elif path.parent == ROOT / "examples" and (ROOT / "docs" / "tutorials" / f"{path.stem}.rst").exists():
            path = ROOT / "docs" / "tutorials" / f"{path.stem}.rst"
        else:
            return match[0]
        return f"]({os.path.relpath(path, folder)})"

    source[0] = LINK.sub(target, source[0])


class LinkNames(SphinxTransform):
    """Link every ``eq.name`` in the text to its entry in the reference."""

    default_priority = 5

    def apply(self, **kwargs: object) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            name = re.match(r"eq\.([A-Za-z_]\w*)", literal.astext())
            inside = (literal.parent, literal.parent.parent)
            linked = any(isinstance(node, nodes.reference | nodes.title) for node in inside)
            if linked or not name or name[1] not in eq.__all__:
                continue
            kind = "mod" if name[1] in ("joint", "lab", "models", "operators", "tasks") else "obj"
            link = pending_xref(
                "", refdomain="py", reftype=kind, reftarget=f"equipoise.{name[1]}", refexplicit=True, refwarn=True
            )
            link["refdoc"] = self.env.docname
            literal.replace_self(link)
            link += literal


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", rewrite)
    app.add_transform(LinkNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
