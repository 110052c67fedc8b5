"""Reading a Serve config file and laying flags and overrides over it."""

from pathlib import Path

import pytest
import yaml

from serve_app.errors import ConfigError
from serve_app.local import servefile


def write(path: Path, **content: object) -> Path:
    application = {"name": "a", "import_path": "foreign:app", "args": {"engine": {"kind": "vllm", "x": 1}, "list": [1]}}
    path.write_text(yaml.safe_dump({"applications": [application], **content}))
    return path


def test_without_http_options_it_is_loopback_and_8000(tmp_path: Path) -> None:
    file = servefile.read(write(tmp_path / "a.yaml"))
    assert (file.host, file.port) == ("127.0.0.1", 8000)


def test_flags_win_over_the_file_and_keep_its_other_options(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", http_options={"host": "0.0.0.0", "port": 1234, "root_path": "/x"})
    file = servefile.read(path, port=4321)
    assert file.content["http_options"] == {"host": "0.0.0.0", "port": 4321, "root_path": "/x"}


def test_overrides_merge_sections_and_replace_values(tmp_path: Path) -> None:
    file = servefile.read(write(tmp_path / "a.yaml"), overrides={"engine": {"kind": "sim"}, "list": [2, 3]})
    assert file.args == {"engine": {"kind": "sim", "x": 1}, "list": [2, 3]}


def test_merging_changes_neither_side() -> None:
    base, over = {"a": {"b": 1}}, {"a": {"c": [1]}}
    merged = servefile.merge(base, over)
    merged["a"]["c"].append(2)
    assert (base, over) == ({"a": {"b": 1}}, {"a": {"c": [1]}})


def test_overrides_of_our_application_are_checked_by_name() -> None:
    with pytest.raises(ConfigError, match=r"engine\.knid"):
        servefile.read(servefile.DEFAULT_CONFIG, overrides={"engine": {"knid": "sim"}})


@pytest.mark.parametrize("path", sorted(servefile.DEFAULT_CONFIG.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_file_we_ship_is_valid(path: Path) -> None:
    file = servefile.read(path)
    assert file.config is not None
    assert file.model_name == file.config.model.name
