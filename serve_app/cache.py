"""Owns where this project keeps files of its own on a machine: prepared models and the state of detached runs.

Knows nothing of what is in them.
"""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$TOKENLINE_CACHE`, else `$XDG_CACHE_HOME/tokenline`, else `~/.cache/tokenline`; not created here."""
    own = os.environ.get("TOKENLINE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared).expanduser().absolute() if shared else Path.home() / ".cache"
    return base / "tokenline"
