"""Malformed and hostile requests: each gets a 4xx at once, in OpenAI's error shape, which names the field at fault.

The table is generated: wrong values for every field, numbers out of every range, text that is no Unicode, JSON that is
none, and requests that contradict themselves. What HTTP clients refuse to send goes over a bare socket.
"""

import asyncio
import contextlib
import gzip
import itertools
import json
import re
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

MODEL = "simulated"
VOCABULARY = 49152
# For what is refused only after it was rendered and tokenized; the tokenizer's own limit is 5 s.
TOKENIZED_LIMIT_S = 4.0

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

TURN = {"role": "user", "content": "hi"}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [TURN], "max_tokens": 2},
    COMPLETION: {"model": MODEL, "prompt": "hi", "max_tokens": 2},
    TOKENIZE: {"model": MODEL, "prompt": "hi"},
    DETOKENIZE: {"model": MODEL, "tokens": [100]},
}


@dataclass(frozen=True)
class Case:
    """A request, and the answer it must get. `params`: the names that the error may give to the field at fault."""

    name: str
    path: str
    body: bytes
    params: tuple[str, ...]
    status: int = 400
    method: str = "POST"
    code: str | None = None
    limit_s: float = 1.0


def raw(path: str, replaced: dict[str, str]) -> bytes:
    """A good body of `path` with fields replaced by JSON text as it is, well-formed or not."""
    fields = {name: json.dumps(value) for name, value in GOOD[path].items()} | replaced
    inside = ",".join(f'"{name}":{value}' for name, value in fields.items())
    return ("{" + inside + "}").encode("utf-8", "surrogateescape")


def field_case(path: str, name: str, value: str, params: Iterable[str] = (), label: str = "") -> Case:
    shown = label or (value if len(value) <= 24 else f"{value[:12]}…{len(value)}")
    return Case(f"{path} {name}={shown}", path, raw(path, {name: value}), tuple(params) or (name,))


def json_case(path: str, label: str, params: str | tuple[str, ...], code: str | None = None, **fields: Any) -> Case:
    body = json.dumps(GOOD[path] | fields).encode()
    return Case(f"{path} {label}", path, body, (params,) if isinstance(params, str) else params, code=code)


BEYOND = ["1e400", "-1e400", "1" + "0" * 30, "-1" + "0" * 30, "1" + "0" * 5000, "NaN", "Infinity", "-Infinity"]
NO_NUMBER = ['"1"', "true", "[]", "{}", "[1]"]
# A lone surrogate, escaped; half of a pair before another character; bytes that are not UTF-8; an encoded surrogate.
NO_TEXT = ['"a\\ud800"', '"\\ud83dx"', '"a\udcff"', '"\udced\udca0\udc80"', '"\udcc0\udc80"']

SHARED_INTS = ["max_tokens", "n", "seed", "top_k", "min_tokens", "truncate_prompt_tokens"]
SHARED_FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
SHARED_BOOLS = ["stream", "ignore_eos", "store"]
SHARED_TEXTS = [
    "model",
    "user",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
]
INTS = {
    CHAT: [*SHARED_INTS, "top_logprobs", "max_completion_tokens"],
    COMPLETION: [*SHARED_INTS, "logprobs", "best_of"],
}
FLOATS = {CHAT: SHARED_FLOATS, COMPLETION: SHARED_FLOATS}
BOOLS = {
    CHAT: [*SHARED_BOOLS, "logprobs", "parallel_tool_calls"],
    COMPLETION: [*SHARED_BOOLS, "echo"],
    TOKENIZE: ["add_special_tokens", "add_generation_prompt", "return_token_strs"],
}
TEXTS = {CHAT: SHARED_TEXTS, COMPLETION: [*SHARED_TEXTS, "prompt", "suffix"], TOKENIZE: ["model", "prompt"]}
TEXTS[DETOKENIZE] = ["model"]


def wrong_types() -> Iterator[Case]:
    kinds: list[tuple[dict[str, list[str]], list[str]]] = [
        (INTS, [*NO_NUMBER, "1.5", *BEYOND]),
        (FLOATS, [*NO_NUMBER, *BEYOND]),
        (BOOLS, ["1", '"true"', "[]", "{}", "NaN", "1e400"]),
        (TEXTS, ["1", "true", "{}", "NaN", "1" + "0" * 400]),
    ]
    for fields, values in kinds:
        for path, names in fields.items():
            for name, value in itertools.product(names, values):
                yield field_case(path, name, value)
    for path, name in [(CHAT, "model"), (CHAT, "messages"), (COMPLETION, "prompt"), (DETOKENIZE, "tokens")]:
        yield field_case(path, name, "null")
    yield field_case(TOKENIZE, "prompt", "[]")
    yield field_case(DETOKENIZE, "model", "[]")


def texts_that_are_none() -> Iterator[Case]:
    for path, names in TEXTS.items():
        for name, (number, value) in itertools.product(names, enumerate(NO_TEXT)):
            yield field_case(path, name, value, label=f"no text {number}")


def out_of_bounds() -> Iterator[Case]:
    for path in (CHAT, COMPLETION):
        for name, values in {
            "temperature": ["-0.1", "2.01"],
            "top_p": ["0", "-1", "1.01"],
            "top_k": ["-2"],
            "min_p": ["-0.1", "1.1"],
            "presence_penalty": ["-2.1", "2.1"],
            "frequency_penalty": ["-2.1", "2.1"],
            "repetition_penalty": ["0", "-1", "101"],
            "n": ["0", "-1", "129", "1025"],
            "max_tokens": ["0", "-1", "-9223372036854775808", "4294967296"],
            "seed": ["9223372036854775808", "-9223372036854775809", "18446744073709551616"],
            "min_tokens": ["-1", "3", "2147483648"],
            "truncate_prompt_tokens": ["0", "-1"],
        }.items():
            for value in values:
                yield field_case(path, name, value)
    yield json_case(CHAT, "no completion tokens", "max_completion_tokens", max_tokens=None, max_completion_tokens=0)
    yield field_case(CHAT, "max_completion_tokens", "-1")
    yield field_case(CHAT, "top_logprobs", "21")
    yield field_case(CHAT, "top_logprobs", "-1")
    yield field_case(COMPLETION, "logprobs", "21")
    yield field_case(COMPLETION, "logprobs", "-1")
    long = "context_length_exceeded"
    yield json_case(CHAT, "max_tokens over the context", "max_tokens", long, max_tokens=1_000_000)
    yield json_case(
        CHAT, "messages far over the context", "messages", long, messages=[TURN | {"content": "a b " * 60_000}]
    )
    yield json_case(COMPLETION, "prompt far over the context", "prompt", long, prompt="word " * 40_000)
    yield json_case(COMPLETION, "prompt of 3 MB", "prompt", long, prompt="x" * 3_000_000)
    yield json_case(COMPLETION, "ids over the context", "prompt", long, prompt=[1] * 9000)
    yield json_case(COMPLETION, "one long prompt of two", "prompt", long, prompt=["hi", "word " * 40_000])
    yield json_case(TOKENIZE, "prompt of 3 MB", "prompt", long, prompt="x" * 3_000_000)
    # By their bytes these are over what the context can hold at the model's longest token, whatever the ids are.
    for label, text in {
        "600,000 emoji": "\N{GRINNING FACE}" * 600_000,
        "400,000 Chinese characters": "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 400_000,
    }.items():
        body = json.dumps(GOOD[COMPLETION] | {"prompt": text}, ensure_ascii=False).encode()
        yield Case(f"{COMPLETION} {label}", COMPLETION, body, ("prompt",), code=long)
    # None of these is long enough to be refused by its length alone.
    for label, text in {
        "one word of 300 kB": "a" * 300_000,
        "600 kB of spaces": " " * 600_000,
        "200 kB of line ends": "\r\n" * 100_000,
        "100,000 digits": "7" * 100_000,
        "50,000 combining marks": "e\u0301" * 50_000,
        "special tokens only": "<|im_start|>" * 20_000,
    }.items():
        body = json.dumps(GOOD[COMPLETION] | {"prompt": text}, ensure_ascii=False).encode()
        yield Case(f"{COMPLETION} {label}", COMPLETION, body, ("prompt",), code=long, limit_s=TOKENIZED_LIMIT_S)
    many = [TURN] * 70_000
    yield json_case(CHAT, "70,000 messages", "messages", messages=many)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 65_000}]
    for label, turns in {"65,000 messages": many[:65_000], "65,000 parts": parts}.items():
        body = json.dumps(GOOD[CHAT] | {"messages": turns}).encode()
        yield Case(f"{CHAT} {label}", CHAT, body, ("messages",), code=long, limit_s=TOKENIZED_LIMIT_S)
    yield json_case(COMPLETION, "200,000 prompts", ("prompt",), prompt=["a"] * 200_000)
    yield json_case(COMPLETION, "129 prompts", ("prompt",), prompt=["a"] * 129)
    yield json_case(COMPLETION, "43 prompts with n=3", ("n", "prompt"), prompt=["a"] * 43, n=3)
    yield json_case(
        CHAT,
        "min_tokens over max_completion_tokens",
        "min_tokens",
        max_tokens=None,
        max_completion_tokens=2,
        min_tokens=3,
    )


def prompts() -> Iterator[Case]:
    yield json_case(COMPLETION, "empty prompt", "prompt", prompt="")
    yield json_case(COMPLETION, "no prompts", "prompt", prompt=[])
    yield json_case(COMPLETION, "an empty prompt in a list", ("prompt", "prompt[1]"), prompt=["a", ""])
    yield json_case(COMPLETION, "empty ids", ("prompt", "prompt[0]"), prompt=[[]])
    for label, prompt, params in [
        ("text and id", ["a", 1], ("prompt", "prompt[1]")),
        ("id and text", [1, "a"], ("prompt", "prompt[1]")),
        ("id and list", [1, [2]], ("prompt", "prompt[1]")),
        ("text and list", ["a", [2]], ("prompt", "prompt[1]")),
        ("null inside", ["a", None], ("prompt[1]",)),
        ("bool inside", [True], ("prompt[0]",)),
        ("float inside", [1.5], ("prompt[0]",)),
        ("three levels", [[[1]]], ("prompt[0][0]",)),
        ("text in ids", [[1, "a"]], ("prompt[0][1]",)),
        ("negative id", [-1], ("prompt[0]", "prompt")),
        ("negative id in a list", [[1, -1]], ("prompt[0][1]", "prompt")),
        ("first id past the vocabulary", [VOCABULARY], ("prompt", "prompt[0]")),
        ("huge id", [2**31 - 1], ("prompt", "prompt[0]")),
        ("id past 32 bits", [2**31], ("prompt[0]",)),
        ("id past 64 bits", [2**64], ("prompt[0]",)),
        ("object", {"text": "a"}, ("prompt",)),
    ]:
        yield json_case(COMPLETION, label, params, prompt=prompt)
    for number, value in enumerate(NO_TEXT):
        yield field_case(COMPLETION, "prompt", f'["a",{value}]', ("prompt[1]",), f"list, no text {number}")
    for value in BEYOND:
        yield field_case(COMPLETION, "prompt", f"[1,{value}]", ("prompt[1]",))


def messages() -> Iterator[Case]:
    yield json_case(CHAT, "no messages", "messages", messages=[])
    for value in ('"hi"', "1", "{}", "[1]", "[null]", '["hi"]', "[[]]"):
        yield field_case(CHAT, "messages", value, ("messages", "messages[0]"))
    for label, message, param in [
        ("no role", {"content": "a"}, "role"),
        ("no content", {"role": "user"}, "content"),
        ("null content", {"role": "user", "content": None}, "content"),
        ("null content of system", {"role": "system", "content": None}, "content"),
        ("unknown role", TURN | {"role": "wizard"}, "role"),
        ("empty role", TURN | {"role": ""}, "role"),
        ("role in capitals", TURN | {"role": "USER"}, "role"),
        ("huge role", TURN | {"role": "r" * 100_000}, "role"),
        ("role tool", TURN | {"role": "tool", "tool_call_id": "a"}, "role"),
        ("role function", TURN | {"role": "function", "name": "f"}, "role"),
        ("number as role", TURN | {"role": 1}, "role"),
        ("number as content", TURN | {"content": 1}, "content"),
        ("object as content", TURN | {"content": {"type": "text", "text": "a"}}, "content"),
        ("text in content list", TURN | {"content": ["a"]}, "content[0]"),
        ("number as name", TURN | {"name": 1}, "name"),
        ("unknown field", TURN | {"colour": "red"}, "colour"),
        ("tool calls", {"role": "assistant", "tool_calls": [{"id": "a"}]}, "tool_calls"),
        ("function call", {"role": "assistant", "function_call": {"name": "f"}}, "function_call"),
        ("audio", {"role": "assistant", "audio": {"id": "a"}}, "audio"),
        ("tool_call_id", TURN | {"tool_call_id": "a"}, "tool_call_id"),
    ]:
        where = f"messages[1].{param}"
        yield json_case(CHAT, label, where, messages=[TURN, message])
        yield json_case(TOKENIZE, f"messages: {label}", where, prompt=None, messages=[TURN, message])
    url = {"url": "data:image/png;base64,AAAA"}
    for label, part, param in [
        ("image part", {"type": "image_url", "image_url": url}, ".type"),
        ("audio part", {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, ".type"),
        ("file part", {"type": "file", "file": {"file_id": "a"}}, ".type"),
        ("refusal part", {"type": "refusal", "refusal": "no"}, ".type"),
        ("unknown part", {"type": "video"}, ".type"),
        ("part without type", {"text": "a"}, ".type"),
        ("part without text", {"type": "text"}, ".text"),
        ("part with null text", {"type": "text", "text": None}, ".text"),
        ("part with number text", {"type": "text", "text": 1}, ".text"),
        ("unknown field of a part", {"type": "text", "text": "a", "colour": 1}, ".colour"),
        ("text part with an image", {"type": "text", "text": "a", "image_url": url}, ".image_url"),
        ("text part with audio", {"type": "text", "text": "a", "input_audio": {"data": ""}}, ".input_audio"),
        ("text part with a file", {"type": "text", "text": "a", "file": {"file_id": "a"}}, ".file"),
        ("null part", None, ""),
    ]:
        content = [{"type": "text", "text": "a"}, part]
        yield json_case(CHAT, label, f"messages[0].content[1]{param}", messages=[TURN | {"content": content}])
    for name in ("role", "content", "name"):
        for number, value in enumerate(NO_TEXT):
            inside = json.dumps({key: one for key, one in TURN.items() if key != name})[1:-1]
            text = f'[{{{inside},"{name}":{value}}}]'
            yield field_case(CHAT, "messages", text, (f"messages[0].{name}",), f"{name}: no text {number}")
    for number, value in enumerate(NO_TEXT):
        text = f'[{{"role":"user","content":[{{"type":"text","text":{value}}}]}}]'
        yield field_case(CHAT, "messages", text, ("messages[0].content[0].text",), f"part: no text {number}")


def stops() -> Iterator[Case]:
    for path in (CHAT, COMPLETION):
        yield json_case(path, "empty stop", "stop", stop="")
        yield json_case(path, "empty stop in a list", ("stop", "stop[1]"), stop=["a", ""])
        yield json_case(path, "17 stops", "stop", stop=["a"] * 17)
        yield json_case(path, "100,000 stops", "stop", stop=["a"] * 100_000)
        yield json_case(path, "long stop", "stop", stop="a" * 1025)
        yield json_case(path, "long stop in a list", ("stop", "stop[0]"), stop=["a" * 100_000])
    for value in ("1", "true", "{}", "NaN", "1e400"):
        yield field_case(CHAT, "stop", value)
    for value in ("[1]", "[null]", "[[]]", "[NaN]", *(f"[{text}]" for text in NO_TEXT)):
        yield field_case(CHAT, "stop", value, ("stop[0]",), ascii(value))
    for number, value in enumerate(NO_TEXT):
        yield field_case(COMPLETION, "stop", value, label=f"no text {number}")
    for value in ("1", '"a"', "{}", "NaN"):
        yield field_case(CHAT, "stop_token_ids", value)
    for value in ("[-1]", "[1.5]", '["1"]', "[true]", "[null]", *(f"[{number}]" for number in BEYOND)):
        yield field_case(CHAT, "stop_token_ids", value, ("stop_token_ids[0]",))
    yield json_case(CHAT, "stop token past the vocabulary", "stop_token_ids", stop_token_ids=[VOCABULARY])
    yield json_case(CHAT, "too many stop tokens", "stop_token_ids", stop_token_ids=list(range(257)))


def biases() -> Iterator[Case]:
    for value in ("1", '"a"', "[]", "true", "NaN", "1e400"):
        yield field_case(CHAT, "logit_bias", value)
    for path in (CHAT, COMPLETION):
        for key in ("abc", "", " 1", "1.5", "1e3", "0x10", "-1", str(VOCABULARY), "1" + "0" * 30, "1" * 5000, "NaN"):
            yield field_case(path, "logit_bias", f'{{"{key}":1}}', label=f"key {key[:20]!r}")
        for value in ("101", "-101", '"1"', "true", "null", "[]", *BEYOND):
            params = ("logit_bias", "logit_bias.5", "logit_bias[5]")
            yield field_case(path, "logit_bias", f'{{"5":{value}}}', params, f"value {value[:20]}")
    yield json_case(CHAT, "too many biases", "logit_bias", logit_bias={str(key): 1 for key in range(1025)})
    yield json_case(CHAT, "200,000 biases", "logit_bias", logit_bias={str(key): 1 for key in range(200_000)})


def contradictions_and_unserved() -> Iterator[Case]:
    yield json_case(CHAT, "two different limits", "max_tokens", max_tokens=2, max_completion_tokens=3)
    yield json_case(CHAT, "top_logprobs without logprobs", "top_logprobs", top_logprobs=2)
    yield json_case(CHAT, "top_logprobs with logprobs off", "top_logprobs", top_logprobs=2, logprobs=False)
    yield json_case(COMPLETION, "best_of is not n", "best_of", n=1, best_of=2)
    yield json_case(COMPLETION, "suffix", "suffix", suffix="x")
    for path in (CHAT, COMPLETION):
        yield json_case(path, "stream_options unstreamed", "stream_options", stream_options={"include_usage": True})
        options = {"include_usage": "yes"}
        yield json_case(path, "bad option", "stream_options.include_usage", stream=True, stream_options=options)
        options = {"include_usage": True, "colour": 1}
        yield json_case(path, "unknown option", "stream_options.colour", stream=True, stream_options=options)
        yield json_case(path, "options are a list", "stream_options", stream=True, stream_options=[])
    for name, value in {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a"}},
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "wav"},
        "prediction": {"type": "content", "content": "a"},
        "reasoning_effort": "high",
        "verbosity": "low",
        "web_search_options": {},
    }.items():
        yield json_case(CHAT, f"unserved {name}", name, "unsupported_parameter", **{name: value})
        yield field_case(CHAT, name, "17")
    yield json_case(TOKENIZE, "prompt and messages", ("prompt", "messages"), messages=[TURN])
    yield json_case(TOKENIZE, "neither prompt nor messages", ("prompt", "messages"), prompt=None)
    yield json_case(TOKENIZE, "empty messages", "messages", prompt=None, messages=[])
    yield json_case(TOKENIZE, "list of prompts", "prompt", prompt=["a"])
    for value in (
        "[-1]",
        f"[{VOCABULARY}]",
        '["a"]',
        "[1.5]",
        "[true]",
        "[null]",
        "[[1]]",
        *(f"[{one}]" for one in BEYOND),
    ):
        yield field_case(DETOKENIZE, "tokens", value, ("tokens", "tokens[0]"))
    for value in ('"a"', "1", "{}", "NaN"):
        yield field_case(DETOKENIZE, "tokens", value)
    for path in GOOD:
        yield Case(
            f"{path} unknown model", path, raw(path, {"model": '"gpt-4o"'}), ("model",), 404, code="model_not_found"
        )
        yield Case(f"{path} huge model", path, raw(path, {"model": f'"{"m" * 500_000}"'}), ("model",), 404)
        yield field_case(path, "model", '""')


UNKNOWN_KEYS = {
    "plain": ("colour", "colour"),
    "near a known one": ("Model", "Model"),
    "with a null byte": ("a\\u0000b", "a\0b"),
    "quoted": ('a\\"b', 'a"b'),
    "with a line end": ("a\\r\\nx-evil: 1", "a\r\nx-evil: 1"),
    "markup": ("<script>alert(1)</script>", "<script>alert(1)</script>"),
    "backquoted": ("a`b", "a`b"),
    "posing as another field's key": ("a - at `$.model`", "a - at `$.model`"),
    "prototype": ("__proto__", "__proto__"),
    "huge": ("k" * 500_000, "k" * 200),
}


def unknown_fields() -> Iterator[Case]:
    for path in GOOD:
        for label, (key, param) in UNKNOWN_KEYS.items():
            yield Case(
                f"{path} unknown field, {label}", path, raw(path, {key: "1"}), (param,), code="unsupported_parameter"
            )
        yield Case(f"{path} field without a name", path, raw(path, {"": "1"}), ("", "body", '""'))
        # No valid Unicode can name them; what stands in for the bad part is free.
        for number, key in enumerate(("us\\ud800er", "us\udcffer")):
            yield Case(f"{path} key that is no text {number}", path, raw(path, {key: "1"}), ("us?er", "us\ufffder"))
    inside = '[{"role":"user","content":"a","us\\ud800er":1}]'
    yield field_case(CHAT, "messages", inside, ("messages[0].us?er", "messages[0].us\ufffder"), "key no text")
    yield field_case(CHAT, "metadata", '{"a\\ud800":1}', ("metadata.a?", "metadata.a\ufffd"))
    yield field_case(CHAT, "metadata", '{"a":"\\ud800"}', ("metadata.a",))
    yield field_case(CHAT, "metadata", '{"a":[1,NaN]}', ("metadata.a[1]",))


def missing_fields() -> Iterator[Case]:
    for path, required in {
        CHAT: ["model", "messages"],
        COMPLETION: ["model", "prompt"],
        DETOKENIZE: ["tokens"],
    }.items():
        for name in required:
            body = {key: value for key, value in GOOD[path].items() if key != name}
            yield Case(f"{path} without {name}", path, json.dumps(body).encode(), (name,))
        yield Case(f"{path} empty object", path, b"{}", tuple(required))
    yield Case(f"{TOKENIZE} empty object", TOKENIZE, b"{}", ("prompt", "messages"))


def deep_json() -> Iterator[Case]:
    deep = "[" * 100_000 + "]" * 100_000
    for name in ("metadata", "tools", "response_format", "prompt", "stop", "model"):
        path = COMPLETION if name == "prompt" else CHAT
        yield field_case(path, name, deep, (name, f"{name}[0]", f"{name}[0][0]", "body"), "deep arrays")
        objects = '{"a":' * 100_000 + "1" + "}" * 100_000
        yield field_case(path, name, objects, (name, "body"), "deep objects")
    inside = f'[{{"role":"assistant","content":"a","tool_calls":{deep}}}]'
    yield field_case(CHAT, "messages", inside, ("messages[0].tool_calls", "body"), "deep tool calls")
    inside = f'[{{"role":"user","content":[{{"type":"text","text":"a","image_url":{deep}}}]}}]'
    yield field_case(CHAT, "messages", inside, ("messages[0].content[0].image_url", "body"), "deep part")
    for path in GOOD:
        yield Case(f"{path} 100,000 open brackets", path, b"[" * 100_000, ("body",))
        yield Case(f"{path} 100,000 open braces", path, b'{"model":' * 100_000, ("body", "model"))
        yield Case(f"{path} deep array as the body", path, deep.encode(), ("body",))


def no_json() -> Iterator[Case]:
    good = json.dumps(GOOD[CHAT])
    bodies: dict[str, bytes] = {
        "empty": b"",
        "spaces": b" \r\n\t ",
        "null": b"null",
        "number": b"17",
        "huge number": b"1e400",
        "5000 digits": b"1" * 5000,
        "NaN": b"NaN",
        "text": b'"hello"',
        "lone surrogate": b'"\\ud800"',
        "true": b"true",
        "array": b"[]",
        "array of a request": f"[{good}]".encode(),
        "BOM": b"\xef\xbb\xbf" + good.encode(),
        "UTF-16": good.encode("utf-16"),
        "UTF-16 BE": good.encode("utf-16-be"),
        "UTF-32": good.encode("utf-32"),
        "NUL bytes": b"\0" * 64,
        "bytes": bytes(range(256)),
        "gzip": gzip.compress(good.encode()),
        "form": b"model=simulated&prompt=hi",
        "multipart": b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nsimulated\r\n--x--\r\n',
        "xml": b"<?xml version='1.0'?><model>simulated</model>",
        "yaml": b"model: simulated\nmessages: []\n",
        "single quotes": good.replace('"', "'").encode(),
        "no quotes": b"{model: 1}",
        "comma at the end": good.replace("}", ",}").encode(),
        "comment": ("/* hi */" + good).encode(),
        "two objects": (good + good).encode(),
        "rubbish at the end": (good + "x").encode(),
        "NUL at the end": (good + "\0").encode(),
        "leading zero": good.replace("2}", "02}").encode(),
        "plus sign": good.replace("2}", "+2}").encode(),
        "hexadecimal": good.replace("2}", "0x2}").encode(),
        "number without digits": good.replace("2}", "-}").encode(),
        "point at the end": good.replace("2}", "2.}").encode(),
        "exponent without digits": good.replace("2}", "2e}").encode(),
        "line end in a text": good.replace("hi", "h\ni").encode(),
        "bad escape": good.replace("hi", "\\x41").encode(),
        "half an escape": good.replace("hi", "\\u12").encode(),
        "undefined": good.replace("2}", "undefined}").encode(),
        "True": good.replace("2}", "True}").encode(),
    }
    for label, body in bodies.items():
        yield Case(f"{CHAT} body: {label}", CHAT, body, ("body",))
    for path, fields in GOOD.items():
        text = json.dumps(fields)
        for length in (1, len(text) // 2, len(text) - 1):
            yield Case(f"{path} cut after {length}", path, text[:length].encode(), ("body",))
        for label in ("empty", "null", "array", "UTF-16", "BOM", "text", "number"):
            if path != CHAT:
                yield Case(f"{path} body: {label}", path, bodies[label], ("body",))


def duplicates() -> Iterator[Case]:
    # The last of two counts, as in Python, JavaScript and Go; what stood first must not save it.
    text = json.dumps(GOOD[CHAT])[:-1]
    yield Case(
        f"{CHAT} second temperature is bad",
        CHAT,
        f'{text},"temperature":1,"temperature":3}}'.encode(),
        ("temperature",),
    )
    yield Case(f"{CHAT} second messages are empty", CHAT, f'{text},"messages":[]}}'.encode(), ("messages",))
    yield Case(f"{CHAT} second model is unknown", CHAT, f'{text},"model":"gpt-4o"}}'.encode(), ("model",), 404)
    yield Case(
        f"{CHAT} first temperature is bad", CHAT, f'{text},"temperature":3,"temperature":1}}'.encode(), ("temperature",)
    )


def too_large() -> Iterator[Case]:
    for path in GOOD:
        body = raw(path, {"user": '"' + "a" * 10_000_000 + '"'})
        yield Case(f"{path} 10 MB", path, body, ("body",), 413, code="body_too_large")
    yield Case(f"{CHAT} 10 MB of spaces", CHAT, b" " * 10_000_000, ("body",), 413)


def routes() -> Iterator[Case]:
    for path in GOOD:
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND"):
            yield Case(f"{method} {path}", path, b"", ("method",), 405, method, "method_not_allowed")
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/ready", "/version"):
        for method in ("POST", "DELETE"):
            yield Case(f"{method} {path}", path, b"", ("method",), 405, method, "method_not_allowed")
    for path in (
        "/",
        "/v1",
        "/v1/",
        "/v1/chat",
        "/v1/chat/completions/",
        "/v1/chat/completions/x",
        "/v1/completions/",
        "/v1/embeddings",
        "/V1/models",
        "/v1//models",
        "//v1/models",
        "/health/",
        "/tokenize/",
        "/docs",
        "/openapi.json",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/v1/%2e%2e/health",
        "/health%00",
        "/%ff%fe",
        "/%0d%0ax-evil:%201",
        "/" + "a" * 5000,
        "/<script>alert(1)</script>",
        "/v1/chat/completions;x=1",
    ):
        for method in ("GET", "POST"):
            yield Case(f"{method} {path[:60]}", path, b"", ("path",), 404, method, "not_found")
    for name in ("gpt-4o", "%2e%2e/%2e%2e/etc/passwd", "%ff", "%00", f"{MODEL}/", f"{MODEL}%20", "a" * 5000):
        yield Case(f"GET /v1/models/{name[:40]}", f"/v1/models/{name}", b"", ("model",), 404, "GET", "model_not_found")


CASES = [
    *wrong_types(),
    *texts_that_are_none(),
    *out_of_bounds(),
    *prompts(),
    *messages(),
    *stops(),
    *biases(),
    *contradictions_and_unserved(),
    *unknown_fields(),
    *missing_fields(),
    *deep_json(),
    *no_json(),
    *duplicates(),
    *too_large(),
    *routes(),
]


def test_the_table_has_many_cases_and_none_twice() -> None:
    assert len(CASES) >= 200
    requests = [(case.method, case.path, case.body) for case in CASES]
    assert len(set(requests)) >= len(requests) - 40  # a few are reached on two ways


@pytest.fixture(scope="module")
def http(path: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=path.url, timeout=30) as client:
        yield client


def timed(http: httpx.Client, case: Case) -> tuple[httpx.Response, float]:
    started = time.perf_counter()
    response = http.request(case.method, case.path, content=case.body)
    return response, time.perf_counter() - started


def check_error(response: httpx.Response) -> dict[str, Any]:
    """The `error` object of a response that must be an error in OpenAI's shape."""
    assert 400 <= response.status_code < 500, response.text[:500]
    assert response.status_code != 422
    assert response.headers["content-type"] == "application/json"
    assert len(response.headers.get_list("x-request-id")) == 1
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert len(error["message"]) < 2000
    assert isinstance(error["type"], str)
    assert isinstance(error["code"], str)
    return dict(error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.encode("ascii", "replace").decode())
def test_a_hostile_request_is_refused_at_once_by_name(http: httpx.Client, case: Case) -> None:
    response, elapsed_s = timed(http, case)
    error = check_error(response)
    assert response.status_code == case.status, error
    assert error["param"] in case.params, error
    if case.status not in (404, 405) or error["param"] == "model":
        assert error["param"] in error["message"]
    if case.code is not None:
        assert error["code"] == case.code
    if elapsed_s > case.limit_s:  # once more: this machine may have been busy with something else
        _, elapsed_s = timed(http, case)
    assert elapsed_s <= case.limit_s


# --- what needs more than one request --------------------------------------------------------------------------------


def test_a_long_key_before_many_values_costs_no_memory(http: httpx.Client) -> None:
    """Naming the bad field must not write the whole path out for every value beside it."""
    body = raw(CHAT, {"metadata": '{"' + "k" * 20_000 + '":[' + "0," * 20_000 + "NaN]}"})
    tracemalloc.start()
    try:
        error = check_error(http.post(CHAT, content=body))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error["param"].startswith("metadata.kkk")
    assert peak < 50 * len(body), f"{peak / 1e6:.0f} MB for a body of {len(body) / 1e6:.2f} MB"


def test_a_bad_number_behind_a_million_good_ones_does_not_hold_the_server_up(http: httpx.Client, path: Any) -> None:
    body = raw(CHAT, {"metadata": "[" + "0," * 1_500_000 + "NaN]"})

    async def longest_standstill_s() -> float:
        loop = asyncio.get_running_loop()
        request = loop.run_in_executor(None, lambda: http.post(CHAT, content=body))
        longest, last = 0.0, time.perf_counter()
        while not request.done():
            await asyncio.sleep(0.001)  # a heartbeat on the server's own loop
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        assert check_error(await request)["param"].startswith("metadata")
        return longest

    standstill_s = min(path.run(longest_standstill_s(), 30) for _ in range(2))
    assert standstill_s < 0.5


async def chunks_of(size: int, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * size


@pytest.mark.parametrize("megabytes", [10, 40])
async def test_a_chunked_body_that_is_too_large_is_refused(path: Any, megabytes: int) -> None:
    async with httpx.AsyncClient(base_url=path.url, timeout=30) as client:
        response = await client.post(CHAT, content=chunks_of(1 << 16, megabytes << 4))
        assert response.status_code == 413
        assert check_error(response)["param"] == "body"


@pytest.mark.parametrize("size", [1025, 9000, 1_000_000, 20_000_000])
def test_a_body_over_a_small_limit_is_refused_and_the_answer_arrives(serve: Any, size: int) -> None:
    small = serve({"gateway": {"max_body_bytes": 1024}})
    with httpx.Client(base_url=small.url, timeout=30) as client:
        response = client.post(CHAT, content=b" " * size)
        assert response.status_code == 413
        error = check_error(response)
        assert (error["param"], error["code"]) == ("body", "body_too_large")
        assert "1024" in error["message"]
        assert client.post(CHAT, content=json.dumps(GOOD[CHAT]).encode()).status_code == 200


@pytest.fixture(scope="module")
def impatient(serve: Any) -> Any:
    return serve({"gateway": {"body_timeout_s": 0.3}})


@pytest.mark.parametrize("sent", [b"", b"{", b'{"model":"simulated",'])
def test_a_body_that_does_not_arrive_in_time_is_a_408(impatient: Any, sent: bytes) -> None:
    with impatient.connect() as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n" + sent)
        response = read_response(connection)
    assert response.status_code == 408
    error = check_error(response)
    assert (error["param"], error["code"]) == ("body", "body_timeout")


def test_a_chunked_body_that_trickles_is_a_408(impatient: Any) -> None:
    with impatient.connect() as connection:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"1\r\n{\r\n")
        response = read_response(connection)
    assert response.status_code == 408
    assert check_error(response)["param"] == "body"


# --- over a bare socket ----------------------------------------------------------------------------------------------


def read_response(connection: socket.socket) -> httpx.Response:
    """One response, read by its content length; or, without one, until the server closes."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += _receive(connection)
    head, _, content = received.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = [tuple(line.split(": ", 1)) for line in lines]
    length = {name.lower(): value for name, value in headers}.get("content-length")
    while length is not None and len(content) < int(length):
        content += _receive(connection)
    if length is None:
        while chunk := connection.recv(65536):
            content += chunk
    return httpx.Response(int(status.split()[1]), headers=headers, content=content)


def _receive(connection: socket.socket) -> bytes:
    chunk = connection.recv(65536)
    assert chunk, "the server closed without an answer"
    return chunk


def post(*headers: bytes, path: bytes = b"/v1/chat/completions", body: bytes | None = None) -> bytes:
    content = json.dumps(GOOD[CHAT]).encode() if body is None else body
    fixed = [b"POST " + path + b" HTTP/1.1", b"Content-Length: %d" % len(content)]
    host = [] if any(header.lower().startswith(b"host:") for header in headers) else [b"Host: localhost"]
    return b"\r\n".join([*fixed, *host, *headers]) + b"\r\n\r\n" + content


def ask(service: Any, request: bytes) -> httpx.Response:
    with service.connect() as connection:
        connection.sendall(request)
        return read_response(connection)


@pytest.mark.parametrize(
    "value",
    [
        b"a\tb",
        b"a b",
        b"",
        b"a" * 129,
        b"a" * 60_000,
        b"\xff\xfe",
        b"<script>",
        b"a,b",
        b"../../etc/passwd",
        b"%0d%0ax-evil: 1",
        b'"quoted"',
        b"\xc3\xa9",
    ],
)
def test_a_request_id_that_is_not_sane_is_replaced(path: Any, value: bytes) -> None:
    response = ask(path, post(b"X-Request-Id: " + value))
    assert response.status_code == 200
    (own,) = response.headers.get_list("x-request-id")
    assert re.fullmatch(r"[0-9a-f]{32}", own)


@pytest.mark.parametrize("separator", [b"\r\n", b"\n", b"\r", b"\0", b"\r\n\r\n"])
def test_a_request_id_cannot_bring_a_header_into_the_response(path: Any, separator: bytes) -> None:
    response = ask(path, post(b"X-Request-Id: a" + separator + b"x-evil: 1"))
    assert "x-evil" not in response.headers
    assert response.status_code in (200, 400)


def test_of_two_request_ids_one_comes_back(path: Any) -> None:
    response = ask(path, post(b"X-Request-Id: first", b"X-Request-Id: second"))
    assert len(response.headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize(
    "host",
    [b"[", b"[::1", b"a b", b"]", b"http://evil/", b"\xff", b"a:b:c", b"a:99999999", b"", b"a/b", b"@", b"?x", b"#x"],
)
def test_a_bad_host_header_does_not_break_the_refusal_of_a_path(path: Any, host: bytes) -> None:
    response = ask(path, post(b"Host: " + host, path=b"/nowhere"))
    assert response.status_code in (400, 404)
    error = check_error(response)
    assert error["param"] == "path"
    assert "/nowhere" in error["message"]
    assert "evil" not in response.text


def test_a_slash_at_the_end_is_refused_and_no_redirect_to_a_host_of_the_client_s_choice(path: Any) -> None:
    response = ask(path, post(b"Host: evil.example", path=b"/v1/chat/completions/"))
    assert "location" not in response.headers
    assert response.status_code == 404
    check_error(response)


def test_more_min_tokens_than_the_context_leaves_room_for_are_refused(serve: Any) -> None:
    """Without max_tokens the limit is what the context leaves; vLLM refuses it too, and calls it `min_tokens`."""
    small = serve({"model": {"context_tokens": 64}})
    body = json.dumps({"model": MODEL, "messages": [TURN], "min_tokens": 1000}).encode()
    with httpx.Client(base_url=small.url, timeout=30) as client:
        response = client.post(CHAT, content=body)
    assert response.status_code == 400, response.text
    assert check_error(response)["param"] == "min_tokens"


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(b"Content-Length: -1"),
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: abc\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: a\r\n\r\n",
        b"GET\r\n\r\n",
        b"BREW /v1/chat/completions HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_by_the_server_below_us(path: Any, request_bytes: bytes) -> None:
    response = ask(path, request_bytes)
    assert response.status_code == 400
    assert "html" not in response.headers.get("content-type", "")


def test_a_huge_header_does_no_harm(path: Any) -> None:
    assert ask(path, post(b"X-Filler: " + b"a" * 60_000)).status_code in (200, 400, 431)


@pytest.mark.parametrize("value", [b"00-" + b"0" * 60_000, b"\xff", b"00-zz-zz-zz", b"", b"a" * 55])
def test_a_bad_traceparent_is_ignored(path: Any, value: bytes) -> None:
    assert ask(path, post(b"traceparent: " + value)).status_code == 200


@pytest.mark.parametrize(
    "target",
    [
        b"/../../etc/passwd",
        b"/v1/../../etc/passwd",
        b"*",
        b"http://evil.example/v1/models/x",
        b"//evil.example/v1/models",
        b"/health/../metrics",
        b"/v1/models/%0d%0ax",
        b"/v1/models/x?a=\xff",
        b"/\xc3\xa9",
    ],
)
def test_odd_targets_are_refused_in_our_shape(path: Any, target: bytes) -> None:
    response = ask(path, b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n")
    assert response.status_code in (400, 404)
    if "x-request-id" in response.headers:
        check_error(response)


def test_a_websocket_upgrade_is_refused(path: Any) -> None:
    lines = [
        b"GET /v1/chat/completions HTTP/1.1",
        b"Host: a",
        b"Connection: Upgrade",
        b"Upgrade: websocket",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
    ]
    response = ask(path, b"\r\n".join(lines) + b"\r\n\r\n")
    assert 400 <= response.status_code < 500
    assert "html" not in response.headers.get("content-type", "")


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing_behind(path: Any) -> None:
    before = path.run(count_tasks())
    for _ in range(20):
        with path.connect() as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n{")
    assert ask(path, post()).status_code == 200
    assert path.run(settled(before)) <= before


async def count_tasks() -> int:
    return len(asyncio.all_tasks())


async def settled(target: int, limit_s: float = 5.0) -> int:
    """The number of tasks on the server's loop once it is down to `target`, or after `limit_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while await count_tasks() > target:
                others = asyncio.all_tasks() - {asyncio.current_task()}
                await asyncio.wait(others, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
    return await count_tasks()


def test_after_all_of_that_the_server_answers_a_chat_and_has_nothing_left_over(
    path: Any, client: openai.OpenAI
) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert answer.choices[0].message.content
    load = path.wait_idle()
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)
