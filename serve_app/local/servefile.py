"""Owns reading a Serve config file (`serve_app/configs/`) and laying flags and overrides over it.

Knows nothing of what the application's `args` mean (`serve_app/config.py`), of machines or of Ray.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app.config import AppConfig, load
from serve_app.errors import ConfigError

DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "local-cpu.yaml"
OUR_IMPORT_PATH = "serve_app.app:build_app"

_LOOPBACK, _PORT = "127.0.0.1", 8000


@dataclass(frozen=True)
class ServeFile:
    """A checked file with one application. `content` goes to Ray Serve; `config` is None for a foreign application."""

    path: Path
    content: dict[str, Any]
    config: AppConfig | None

    @property
    def application(self) -> dict[str, Any]:
        """The one entry under `applications`."""
        entry: dict[str, Any] = self.content["applications"][0]
        return entry

    @property
    def args(self) -> dict[str, Any]:
        """The application's own arguments."""
        return self.application["args"] or {}

    @property
    def host(self) -> str:
        """Where HAProxy listens."""
        return str(self.content["http_options"]["host"])

    @property
    def port(self) -> int:
        """The TCP port HAProxy listens on."""
        return int(self.content["http_options"]["port"])

    @property
    def model_name(self) -> str:
        """How clients call the model: `model.name`."""
        return str(self.args.get("model", {}).get("name", ""))


def read(
    path: Path, *, host: str | None = None, port: int | None = None, overrides: Mapping[str, Any] | None = None
) -> ServeFile:
    """The file with `host` and `port` in place of its own, and `overrides` merged into the application's args.

    Raises ConfigError that names the file's key.
    """
    content = _parse(path)
    application = _only_application(path, content)
    args: dict[str, Any] = application.get("args") or {}
    application["args"] = merge(args, overrides or {})
    # Without a host, HAProxy and the ingress replicas listen on all interfaces (Ray Serve 2.60).
    options = {"host": _LOOPBACK, "port": _PORT} | (content.get("http_options") or {})
    options |= {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    if not isinstance(options["port"], int) or not 0 < options["port"] < 65536:
        raise ConfigError(f"{path}: http_options.port: {options['port']!r} is not a port number (1 to 65535)")
    content["http_options"] = options
    config = load(application["args"]) if application["import_path"] == OUR_IMPORT_PATH else None
    return ServeFile(path, content, config)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A new dictionary: sections are merged key by key, any other value of `over` replaces that of `base`."""
    merged = copy.deepcopy(dict(base))
    for key, value in over.items():
        inner = merged.get(key)
        if isinstance(inner, dict) and isinstance(value, Mapping):
            merged[key] = merge(inner, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the config file {path}: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no Serve config file: it has no `applications`")
    return content


def _only_application(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    applications = content.get("applications")
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError(f"{path}: applications: exactly one is needed, with `import_path` and `args`")
    application: dict[str, Any] = applications[0]
    if not isinstance(application.get("import_path"), str):
        raise ConfigError(f"{path}: applications[0].import_path: required, for example {OUR_IMPORT_PATH}")
    for owner, key in ((application, "args"), (content, "http_options")):
        if not isinstance(owner.get(key) or {}, dict):
            raise ConfigError(f"{path}: {key}: keys and values are needed, not {type(owner[key]).__name__}")
    return application
