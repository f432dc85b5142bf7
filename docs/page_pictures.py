"""Draw docs/images/page: every view of the local page with the models that ship, narrow and wide, light and dark.

    python docs/page_pictures.py [VIEW ...]

It drives Chromium as the tests do (Debian's packages chromium and chromium-driver).
"""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "page")]

from test_browser import Page  # noqa: E402

from page_browser import open_browser, resize, screenshot  # noqa: E402 (in the tests)
from page_server import Server  # noqa: E402


def finished(page: Page) -> None:
    """Wait until the status names the outcome of the solve, or of both solvers, and the last step is shown."""
    page.until(lambda: re.search(r"ettled after|Done", page.status) is not None)
    if page.all(f"#view-{page.view} .player output"):
        page.played()


def draw(page: Page) -> None:
    page.choose("second", "forward-backward")
    (three,) = [button for button in page.all("#view-draw .examples button") if button.text == "3"]
    three.click()
    finished(page)
    page.one(".attack button").click()
    page.until(lambda: "hange of length" in page.one(".attack").text)


def restore(page: Page) -> None:
    page.until(lambda: page.all("#view-restore .thumbs button"))
    page.one("[name=middle]").click()
    page.one("[name=solve]").click()


def wait_only(page: Page) -> None:
    pass


VIEWS: dict[str, Callable[[Page], None]] = {
    "draw": draw,
    "restore": restore,
    "generate": wait_only,
    "inside": wait_only,
    "segment": wait_only,
}


def main(views: list[str]) -> None:
    with Server([]).running() as server:
        browser = open_browser()
        for view in views or list(VIEWS):
            for width in (400, 1200):
                for scheme in ("light", "dark"):
                    resize(browser, width, dark=scheme == "dark")
                    page = Page(browser, server)
                    page.open(view)
                    VIEWS[view](page)
                    finished(page)
                    file = ROOT / "docs" / "images" / "page" / f"{view}-{width}-{scheme}.png"
                    picture = Image.open(io.BytesIO(screenshot(browser))).convert("RGB")
                    picture.quantize(128).save(file, optimize=True)  # half the size
                    print(file, file.stat().st_size, flush=True)
        browser.quit()


if __name__ == "__main__":
    main(sys.argv[1:])
