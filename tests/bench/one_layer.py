"""The model of the benchmark: the embedded model's first layer alone, so that two cores make tokens faster than the
serving around them can hide.

Same tokenizer, template, embeddings and vocabulary; what it says means nothing. In float32, as all systems serve it.
"""

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from serve_app.cache import cache_folder
from serve_app.model import EMBEDDED, locate

_OTHER_LAYERS = "model.layers."
_FIRST_LAYER = "model.layers.0."


def one_layer() -> Path:
    """Its folder, made once from the embedded model, which `make model` prepares."""
    source, folder = Path(locate(EMBEDDED)), cache_folder() / "bench" / "one-layer"
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in ("config.json", "tokenline-manifest.json"):
            shutil.copy(file, folder)
    with safe_open(source / "model.safetensors", framework="pt") as weights:
        kept = [name for name in weights.keys() if not name.startswith(_OTHER_LAYERS) or name.startswith(_FIRST_LAYER)]  # noqa: SIM118
        save_file({name: weights.get_tensor(name).float() for name in kept}, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    # Written last: a folder without it is made again.
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "dtype": "float32"}))
    return folder
