"""What clients get is the same, byte for byte, over the token channel and over a stream per request.

The simulated engine makes the same ids for the same prompt, so two runs of the service can be compared. On real vLLM
the equality tests of `test_vllm.py` are run over plain streams with TOKENLINE_PLAIN_STREAMS=1.
"""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.launch import serving

CONFIG = Path(__file__).parents[2] / "serve_app" / "configs" / "simulated.yaml"
CHAT: dict[str, Any] = {"model": "simulated", "messages": [{"role": "user", "content": "Who goes there?"}]}
COMPLETION: dict[str, Any] = {"model": "simulated", "prompt": "Once upon a time, "}
TEXTS = ["日本語のテキスト", "эхо", "👩‍👩‍👧‍👦 family", "SELECT * FROM t;", "<|im_start|>", " ", "a" * 400]
pytestmark = pytest.mark.timeout(400)

# (path, body); each is asked for whole and as a stream.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": text}]}) for text in TEXTS),
    *(("/v1/completions", COMPLETION | {"prompt": text}) for text in TEXTS),
    ("/v1/chat/completions", CHAT | {"n": 5, "max_tokens": 9}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 400}),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 5}),
    ("/v1/chat/completions", CHAT | {"stop": ["e", "zz"], "max_tokens": 300}),
    ("/v1/completions", COMPLETION | {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 7}),
    ("/v1/completions", COMPLETION | {"echo": True, "logprobs": 2}),
    ("/v1/completions", COMPLETION | {"echo": True, "max_tokens": 0}),
    ("/v1/completions", COMPLETION | {"max_tokens": 1}),
    ("/v1/completions", COMPLETION | {"max_tokens": 100_000}),  # too long for the model
    ("/v1/completions", COMPLETION | {"max_tokens": 4000}),  # more KV blocks than the engine has: refused there
    ("/v1/completions", COMPLETION | {"temperature": -1}),
]


def answers(channel: bool) -> list[str]:
    """Every answer, with what differs from request to request taken out."""
    sim = {"step_ms": 1.0, "step_ms_per_sequence": 0.0, "kv_blocks": 128}
    overrides = {"channel": {"enabled": channel}, "engine": {"sim": sim}}
    with (
        serving(CONFIG, port=0, overrides=overrides) as service,
        httpx.Client(base_url=service.url, timeout=60) as http,
    ):
        return [
            f"{answer.status_code} {re.sub(VARIES, '', answer.text)}"
            for path, body in REQUESTS
            for stream in ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}})
            for answer in [http.post(path, json={"max_tokens": 40} | body | stream)]
        ]


VARIES = r'"(id|created)":("[^"]*"|\d+),?'


def by_choice(answer: str) -> list[Any]:
    """A stream's events in the order that is promised: that of each choice."""
    status, *events = answer.split("data: ")
    parsed = [json.loads(event) for event in events if event.startswith("{")]
    order = sorted(parsed, key=lambda event: event["choices"][0]["index"] if event.get("choices") else 99)
    return [status, *order, events[-1:]]


def test_what_clients_get_is_the_same_over_the_channel_and_over_plain_streams() -> None:
    over_channel, over_streams = answers(channel=True), answers(channel=False)
    assert len(over_channel) == 3 * len(REQUESTS)
    assert sum(one.startswith("200") for one in over_channel) >= 3 * (len(REQUESTS) - 3)
    assert {one[:3] for one in over_channel} == {"200", "400"}
    for ours, theirs in zip(over_channel, over_streams, strict=True):
        if "data: " in ours:
            assert by_choice(ours) == by_choice(theirs)
        else:
            assert ours == theirs
