"""Owns the conversion of the embedded GGUF file into a folder that vLLM and transformers load.

Knows nothing of where the file comes from, where the folder ends up, or who else is converting.
"""

import contextlib
import io
import json
from pathlib import Path
from typing import Any


def convert(gguf: Path, folder: Path) -> None:
    """Write tokenizer, config and bfloat16 weights of `gguf` into the existing `folder`; about 5 s and 1 GiB of memory.

    Raises whatever transformers raises for a file that is no GGUF, and OSError when the disk is full.
    """
    # transformers draws its progress bars on stderr whatever its log level is.
    with contextlib.redirect_stderr(io.StringIO()):
        context_tokens = _write_model(gguf, folder)
        _write_tokenizer(gguf, folder, context_tokens)


def _write_model(gguf: Path, folder: Path) -> int:
    # Imported here, and below: they take seconds, and only a conversion needs them.
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # `save_pretrained` refuses a model that came from a GGUF (transformers 5.19), so its files are written one by one.
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]  # the same tensor as the embedding; safetensors refuses shared memory
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it 0600, unlike its neighbours

    config: dict[str, Any] = model.config.to_diff_dict()
    config.pop("quantization_config", None)  # left in, vLLM would look for GGUF tensors
    config.pop("_model_name_or_path", None)
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    _write_json(folder / "config.json", config)
    model.generation_config.save_pretrained(folder)
    return int(model.config.max_position_embeddings)


def _write_tokenizer(gguf: Path, folder: Path, context_tokens: int) -> None:
    from tokenizers import pre_tokenizers  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file says `tokenizer.ggml.pre: smollm`: every digit alone, then GPT-2's split. transformers 5.19 reads only
    # the second half, and then spaces before a digit become other tokens than the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = context_tokens
    tokenizer.clean_up_tokenization_spaces = False  # decoding must give the exact text back
    tokenizer.save_pretrained(folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
