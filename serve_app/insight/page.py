"""The live page's HTML: one file, which loads nothing from anywhere. Its data is `view.py`'s."""

from functools import cache
from importlib.resources import files


@cache
def page() -> bytes:
    """UTF-8; read once."""
    return files("serve_app.insight").joinpath("page.html").read_bytes()
