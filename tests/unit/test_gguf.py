"""The embedded model in this user's cache. Its manifest names the converter, so it is this version's work."""

import json
from pathlib import Path

import pytest

from serve_app.model import prepare_embedded


@pytest.fixture(scope="module")
def folder() -> Path:
    """Converted here if `make model` has not done it: some seconds, or a minute on a busy machine."""
    return prepare_embedded()


def test_config_is_what_vllm_loads_without_a_quantization(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 8192
    assert "quantization_config" not in config


def test_generation_ends_at_the_chat_turns_end(folder: Path) -> None:
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_weights_hold_the_tied_embedding_once(folder: Path) -> None:
    from safetensors import safe_open  # noqa: PLC0415  seconds

    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118  no mapping
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert (embedding.get_shape(), embedding.get_dtype()) == ([49152, 576], "BF16")


def test_tokenizer_keeps_template_special_tokens_and_the_models_own_split(folder: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415  seconds

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer("<|im_start|>").input_ids == [1]
    assert tokenizer.model_max_length == 8192
    chat = tokenizer.apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert chat == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    # Each digit alone, and two spaces before one stay together.
    assert tokenizer.tokenize("a  31") == ["a", "ĠĠ", "3", "1"]
