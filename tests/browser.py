"""A real Chromium for tests, headless. Nothing is downloaded: `make tools` brings one.

Playwright's sync API keeps an event loop running in its thread until it is closed, so a fixture around `chromium()`
must not outlive a module whose tests are all plain functions.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

_VARIABLE = "TOKENLINE_CHROMIUM"
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str:
    """The path of Chromium: $TOKENLINE_CHROMIUM, else the first of its names on the PATH. Raises RuntimeError."""
    named = os.environ.get(_VARIABLE)
    if named:
        if found := shutil.which(named):
            return found
        raise RuntimeError(f"{_VARIABLE}={named} is not a program that can be started")
    for name in _NAMES:
        if found := shutil.which(name):
            return found
    raise RuntimeError(
        "this test needs Chromium and found none on the PATH: run `make tools`, or install it "
        f"(Debian: apt-get install chromium-headless-shell), or name one with {_VARIABLE}=/path/to/chromium"
    )


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, closed at the end of the block."""
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox does not start as root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=as_root)
        try:
            yield browser
        finally:
            browser.close()
