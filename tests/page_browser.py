"""A real browser: Debian's Chromium, headless, driven by selenium."""

from __future__ import annotations

import base64
import shutil
from typing import Any

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def open_browser(width: int = 1200, height: int = 1000) -> Any:
    """Return a browser with a fresh profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    resize(browser, width, height)
    return browser


def resize(browser: Any, width: int, height: int = 1000, dark: bool = False) -> None:
    """Set the size of the window and the preferred colour scheme."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def screenshot(browser: Any) -> bytes:
    """Return a picture (PNG) of the whole page."""
    script = "const page = document.documentElement; return [page.clientWidth, page.scrollHeight]"
    width, height = browser.execute_script(script)
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    return base64.b64decode(shot["data"])
