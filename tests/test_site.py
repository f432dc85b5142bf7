"""The built site: it builds without a warning, loads nothing from elsewhere, and every link and picture is there."""

import importlib.util
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
NOT_LOADED = ("canonical", "prev", "next", "search", "index")  # links that only name another page
pytestmark = pytest.mark.skipif(importlib.util.find_spec("sphinx_gallery") is None, reason="needs the extra docs")


class Page(HTMLParser):
    """Addresses of a page: what it loads, where it links, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.loads, self.links, self.anchors = [], [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[key] for key in ("id", "name") if values.get(key)}
        if values.get(LOADED.get(tag, "")) and values.get("rel") not in NOT_LOADED:
            self.loads.append(values[LOADED[tag]])
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])


@pytest.fixture(scope="module")
def site():
    """The site, built with pictures of tutorials only where a build has drawn them already."""
    out = ROOT / "docs" / "_build" / "html"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs/site"]
    command += ["-d", "docs/_build/doctrees", ".", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_nothing_is_loaded_from_another_host(site):
    for path in site.rglob("*.html"):
        for address in Page(path).loads:
            assert not urlsplit(address).netloc, f"{path.name} loads {address}"
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8").replace(" ", "")
        assert "url(http" not in text
        assert "url(//" not in text
        assert "@importurl(http" not in text


@pytest.mark.slow
def test_every_link_resolves(site):
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for address in page.links + page.loads:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.relative_to(site)}: {address}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.relative_to(site)}: {address}"


@pytest.mark.slow
def test_every_public_name_has_an_entry(site):
    import equipoise as eq

    entries = {anchor for path in (site / "docs" / "reference").glob("*.html") for anchor in Page(path).anchors}
    modules = {"joint", "lab", "models", "operators", "tasks"}
    assert {f"equipoise.{name}" for name in eq.__all__ if name not in modules} <= entries
    assert {f"module-equipoise.{name}" for name in modules} <= entries
