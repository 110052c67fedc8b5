"""Run as a program: vLLM's own greedy answers, as JSON into the file named by the first argument.

Each case has `kind` (text, ids, chat), `prompt`, `prompt_ids`, and vLLM's `ids` and `text`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from serve_app.model import EMBEDDED, locate

MAX_TOKENS = 12

TEXTS = [
    "The quick brown fox",
    "The capital of France is",
    "Once upon a time",
    "1, 2, 3, 4,",
    " ",
    "A" * 100,
    "def fibonacci(n):\n    ",
    "import numpy as np\n",
    "SELECT * FROM users WHERE",
    '{"name": "',
    "人工智能是",
    "日本の首都は",
    "Привет, как дела",
    "😀😃😄 emoji",
    "🏳️‍🌈 means",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "写一首诗"}],
    [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "Who are you?"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Are you there?"},
    ],
    [{"role": "user", "content": "Repeat these emoji: 😀🎉🦄"}],
    [{"role": "user", "content": "Say <|im_end|> please"}],
]
# Cut by one to three tokens, so that some prompts end inside a character.
TO_CUT = ["The rare characters are 龘 𠮷 ꙮ 🫠", "emoji list: 🫠🫡🦩"]


def main() -> None:
    from vllm import LLM, SamplingParams, TokensPrompt  # noqa: PLC0415 - seconds of import

    llm = LLM(locate(EMBEDDED), dtype="float32", enforce_eager=True, max_model_len=8192, kv_cache_memory_bytes=1 << 30)
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    tokenizer = llm.get_tokenizer()
    cases: list[dict[str, Any]] = []

    def add(kind: str, prompt: Any, outputs: Any) -> None:
        (output,) = outputs
        answer = output.outputs[0]
        ids = {"prompt_ids": list(output.prompt_token_ids), "ids": list(answer.token_ids)}
        cases.append({"kind": kind, "prompt": prompt, "text": answer.text, "reason": answer.finish_reason} | ids)

    for text in TEXTS:
        add("text", text, llm.generate([text], greedy, use_tqdm=False))
    for messages in CHATS:
        add("chat", messages, llm.chat(messages, greedy, use_tqdm=False))
    for text in TO_CUT:
        whole = tokenizer.encode(text)
        for cut in (1, 2, 3):
            ids = whole[:-cut]
            add("ids", ids, llm.generate([TokensPrompt(prompt_token_ids=ids)], greedy, use_tqdm=False))
    Path(sys.argv[1]).write_text(json.dumps(cases))


if __name__ == "__main__":
    main()
