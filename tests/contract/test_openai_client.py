"""What the official `openai` client asks for, and what it must get: values, chunks, exceptions of the right class.

The simulated engine is deterministic: what a stop string or a limit must leave is computed from the unlimited answer.
"""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterable
from typing import Any

import openai
import pytest
from raw_http import post

MODEL = "simulated"
MESSAGES: Any = [{"role": "user", "content": "Tell me a story."}]
PROMPT = "Once upon a time"


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 24} | fields)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT, "max_tokens": 24} | fields)


def chat_text(response: Any) -> str:
    return str(response.choices[0].message.content)


def streamed_text(chunks: Iterable[Any], index: int = 0) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index)


def completed_text(chunks: Iterable[Any], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


# --- chat ------------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered_with_text_usage_and_a_finish_reason(client: openai.OpenAI) -> None:
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert abs(answer.created - time.time()) < 60
    assert answer.choices[0].message.role == "assistant"
    assert chat_text(answer)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_a_streamed_chat_has_the_text_of_the_whole_one(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True))
    assert streamed_text(chunks) == chat_text(chat(client))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in chunks[1:]] == [None] * (len(chunks) - 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 1
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


async def test_the_async_client_gets_the_same_answers_streamed_and_not(
    async_client: openai.AsyncOpenAI, client: openai.OpenAI
) -> None:
    expected = chat_text(chat(client))
    whole = await async_client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=24)
    stream = await async_client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=24, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chat_text(whole) == expected
    assert streamed_text(chunks) == expected


async def test_the_async_client_gets_completions_streamed_and_not(async_client: openai.AsyncOpenAI) -> None:
    whole = await async_client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24)
    stream = await async_client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, stream=True)
    assert completed_text([chunk async for chunk in stream]) == whole.choices[0].text


def test_the_stream_helper_of_the_client_accumulates_the_same_message(client: openai.OpenAI) -> None:
    stop = chat_text(chat(client))[40:45]  # the helper refuses an answer that ended at its length limit
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=24, stop=stop) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == chat_text(chat(client, stop=stop))
    assert final.choices[0].finish_reason == "stop"


def test_text_parts_are_joined_like_one_text(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story."}]
    joined = chat(client, messages=[{"role": "user", "content": "Tell me\na story."}])
    answer = chat(client, messages=[{"role": "user", "content": parts}])
    assert chat_text(answer) == chat_text(joined)
    assert answer.usage.prompt_tokens == joined.usage.prompt_tokens


def test_the_developer_role_means_system(client: openai.OpenAI) -> None:
    def ask(role: str) -> str:
        return chat_text(chat(client, messages=[{"role": role, "content": "Be brief."}, *MESSAGES]))

    assert ask("developer") == ask("system")
    assert ask("system") != chat_text(chat(client))


def test_an_answer_can_be_sent_back_as_the_client_received_it(client: openai.OpenAI) -> None:
    first = chat(client).choices[0].message
    turns = [*MESSAGES, first.model_dump(), {"role": "user", "content": "Go on."}]
    assert chat_text(chat(client, messages=turns))
    assert chat_text(chat(client, messages=[*MESSAGES, first, {"role": "user", "content": "Go on."}]))


def test_two_choices_are_numbered_and_counted(client: openai.OpenAI) -> None:
    answer = chat(client, n=2, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.completion_tokens == 48
    assert answer.usage.prompt_tokens == chat(client).usage.prompt_tokens
    chunks = list(chat(client, n=2, seed=7, stream=True, stream_options={"include_usage": True}))
    assert [streamed_text(chunks, index) for index in (0, 1)] == [one.message.content for one in answer.choices]
    assert chunks[-1].usage.completion_tokens == 48
    opening = [one.index for chunk in chunks for one in chunk.choices if one.delta.role == "assistant"]
    assert sorted(opening) == [0, 1]


def test_a_seed_repeats_and_another_seed_differs(client: openai.OpenAI) -> None:
    assert chat_text(chat(client, seed=1)) == chat_text(chat(client, seed=1))
    assert chat_text(chat(client, seed=1)) != chat_text(chat(client, seed=2))


@pytest.mark.parametrize("seed", [0, -1, -(1 << 63), (1 << 63) - 1])
def test_the_first_choice_of_a_seed_does_not_depend_on_n(client: openai.OpenAI, seed: int) -> None:
    assert chat_text(chat(client, seed=seed, n=2)) == chat_text(chat(client, seed=seed))


def test_usage_comes_in_a_last_chunk_without_choices_when_asked_for(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 24
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[:-1])
    completions = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert completions[-1].choices == []
    assert completions[-1].usage.completion_tokens == 24


def test_max_completion_tokens_limits_like_max_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=5)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert chat(client, max_tokens=5, max_completion_tokens=5).usage.completion_tokens == 5
    assert chat_text(answer) == chat_text(chat(client, max_tokens=5))


# --- stops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_string_cuts_the_text_before_it(client: openai.OpenAI, stream: bool, as_list: bool) -> None:
    unstopped = chat_text(chat(client))
    stop = unstopped[20:25]
    answer = chat(client, stop=[stop, "never in the text"] if as_list else stop, stream=stream)
    if stream:
        chunks = list(answer)
        text, reason = streamed_text(chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = chat_text(answer), answer.choices[0].finish_reason
    assert text == unstopped[: unstopped.index(stop)]
    assert reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_of_two_stop_strings_the_first_in_the_text_counts(client: openai.OpenAI, stream: bool) -> None:
    unstopped = complete(client).choices[0].text
    late, early = unstopped[40:43], unstopped[15:20]
    expected = unstopped[: min(unstopped.index(late), unstopped.index(early))]
    answer = complete(client, stop=[late, early], stream=stream)
    text = completed_text(answer) if stream else answer.choices[0].text
    assert text == expected


def test_a_stop_string_that_never_comes_changes_nothing(client: openai.OpenAI) -> None:
    unstopped = complete(client).choices[0].text
    held_back_at_the_end = unstopped[-3:] + "\0"
    answer = complete(client, stop=[held_back_at_the_end], stream=True)
    assert completed_text(answer) == unstopped


def test_a_stop_string_ends_the_engine_request_early(client: openai.OpenAI, path: Any) -> None:
    unstopped = complete(client, max_tokens=64).choices[0].text
    answer = complete(client, max_tokens=4000, stop=unstopped[20:25])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 64
    load = path.wait_idle()
    assert (load.running, load.kv_usage) == (0, 0.0)


def pieces_of(answer: Any) -> list[bytes]:
    """The bytes of each token of an answer with log-probabilities."""
    return [bytes(entry.bytes) for entry in answer.choices[0].logprobs.content]


def id_of(path: Any, raw: bytes) -> int:
    return next(id_ for id_ in range(path.vocabulary.size) if path.vocabulary.raw_bytes(id_) == raw)


def test_stop_token_ids_end_the_text_before_that_token(client: openai.OpenAI, path: Any) -> None:
    pieces = pieces_of(chat(client, logprobs=True))
    stop_id = id_of(path, pieces[6])
    answer = chat(client, extra_body={"stop_token_ids": [stop_id]}, logprobs=True)
    assert answer.choices[0].finish_reason == "stop"
    assert pieces_of(answer) == pieces[:6]
    assert answer.usage.completion_tokens == 7


def test_min_tokens_puts_off_stop_strings_and_stop_token_ids(client: openai.OpenAI, path: Any) -> None:
    pieces = pieces_of(chat(client, logprobs=True))
    stop_id = id_of(path, pieces[2])
    answer = chat(client, extra_body={"stop_token_ids": [stop_id], "min_tokens": 10})
    assert answer.usage.completion_tokens == 24
    unstopped = chat_text(answer)
    stop = unstopped[:4]
    answer = chat(client, stop=stop, extra_body={"min_tokens": 10})
    assert answer.usage.completion_tokens >= 10
    assert chat_text(answer).startswith(stop)


def test_ignore_eos_is_taken(client: openai.OpenAI, path: Any) -> None:
    path.run(_forget(path))
    assert chat(client, extra_body={"ignore_eos": True}).usage.completion_tokens == 24
    assert path.watched.seen[-1].sampling.ignore_eos is True


async def _forget(path: Any) -> None:
    path.watched.seen.clear()


# --- completions -----------------------------------------------------------------------------------------------------


def test_a_prompt_is_a_text_ids_or_a_list_of_either(client: openai.OpenAI, path: Any) -> None:
    ids = path.ids(PROMPT)
    text = complete(client).choices[0].text
    assert complete(client, prompt=list(ids)).choices[0].text == text
    other = complete(client, prompt="Another one").choices[0].text
    several = complete(client, prompt=[PROMPT, "Another one"])
    assert [choice.text for choice in several.choices] == [text, other]
    assert [choice.index for choice in several.choices] == [0, 1]
    assert [choice.text for choice in complete(client, prompt=[list(ids), list(ids)]).choices] == [text, text]
    assert complete(client, prompt=[PROMPT]).choices[0].text == text
    assert complete(client, prompt=list(ids)).usage.prompt_tokens == len(ids)


def test_n_choices_of_several_prompts_come_prompt_by_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, prompt=["one", "two"], n=2, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    first, second = (complete(client, prompt=prompt, n=2, seed=3) for prompt in ("one", "two"))
    expected = [choice.text for choice in (*first.choices, *second.choices)]
    assert [choice.text for choice in answer.choices] == expected
    chunks = list(complete(client, prompt=["one", "two"], n=2, seed=3, stream=True))
    assert [completed_text(chunks, index) for index in range(4)] == expected


def test_a_completion_without_max_tokens_has_sixteen(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front(client: openai.OpenAI, path: Any, stream: bool) -> None:
    text = complete(client).choices[0].text

    def echoed(prompt: Any) -> str:
        answer = complete(client, prompt=prompt, echo=True, stream=stream)
        return completed_text(answer) if stream else str(answer.choices[0].text)

    assert echoed(PROMPT) == PROMPT + text
    assert echoed(list(path.ids(PROMPT))) == PROMPT + text


def test_echo_with_no_tokens_gives_the_prompt_alone(client: openai.OpenAI) -> None:
    answer = complete(client, echo=True, max_tokens=0)
    assert answer.choices[0].text == PROMPT
    assert answer.usage.completion_tokens == 0
    assert answer.choices[0].finish_reason == "length"


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_the_bytes_of_the_whole_text(client: openai.OpenAI, stream: bool) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        text = "".join(choice.delta.content or "" for choice in choices)
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    else:
        text, entries = chat_text(answer), answer.choices[0].logprobs.content
    assert len(entries) == 24
    raw = b"".join(bytes(entry.bytes) for entry in entries)
    assert raw.decode("utf-8", "replace").rstrip("�") == text.rstrip("�")
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert entry.token == entry.top_logprobs[0].token
        assert all(bytes(one.bytes).decode("utf-8", "replace") == one.token for one in entry.top_logprobs)


def test_logprobs_without_top_have_empty_alternatives(client: openai.OpenAI) -> None:
    entries = chat(client, logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in entries] == [[]] * 24


def test_logprobs_end_where_a_stop_string_cut_the_text(client: openai.OpenAI) -> None:
    unstopped = chat_text(chat(client))
    answer = chat(client, logprobs=True, stop=unstopped[20:25])
    raw = b"".join(pieces_of(answer))
    text = chat_text(answer)
    assert raw.decode("utf-8", "replace").startswith(text)
    last = pieces_of(answer)[-1]
    assert len(raw) - len(last) < len(text.encode())


def test_completion_logprobs_are_aligned_with_the_text(client: openai.OpenAI) -> None:
    choice = complete(client, logprobs=2).choices[0]
    logprobs = choice.logprobs
    lengths = {
        len(logprobs.tokens),
        len(logprobs.token_logprobs),
        len(logprobs.top_logprobs),
        len(logprobs.text_offset),
    }
    assert lengths == {24}
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert "�" in token or choice.text.startswith(token, offset)


def test_completion_text_offsets_count_the_echo(client: openai.OpenAI) -> None:
    logprobs = complete(client, logprobs=0, echo=True).choices[0].logprobs
    assert len(PROMPT) in logprobs.text_offset


# --- fields without effect, and fields that are refused --------------------------------------------------------------


def test_fields_that_mean_nothing_here_are_taken(client: openai.OpenAI) -> None:
    plain = chat_text(chat(client))
    answer = chat(
        client,
        user="someone",
        metadata={"purpose": "test"},
        store=False,
        service_tier="auto",
        safety_identifier="abc",
        prompt_cache_key="abc",
        logit_bias={"40": -100, "41": 5.5},
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        tools=[],
        response_format={"type": "text"},
        extra_body={"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1},
    )
    assert chat_text(answer) == plain


def test_an_unknown_field_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, extra_body={"tempperature": 1})
    assert refused.value.param == "tempperature"
    assert refused.value.code == "unsupported_parameter"
    assert "tempperature" in refused.value.message


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"max_tokens": 1_000_000}, "max_tokens", "context_length_exceeded"),
    ],
)
def test_a_bad_field_raises_bad_request_with_param_and_code(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **fields)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert refused.value.type == "invalid_request_error"
    assert param in refused.value.message
    assert refused.value.request_id


def test_a_bad_field_of_a_stream_raises_before_the_stream(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, stream=True, temperature=3)
    assert refused.value.param == "temperature"


def test_too_many_max_completion_tokens_are_refused_under_the_name_that_was_sent(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=1_000_000)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "max_completion_tokens"


def test_an_unknown_model_raises_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        chat(client, model="gpt-4o")
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_the_request_id_of_the_client_comes_back(client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=2, extra_headers={"x-request-id": "my-id.1"}
    )
    assert answer.headers["x-request-id"] == "my-id.1"
    assert answer.parse().id == "chatcmpl-my-id.1"


# --- models ----------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == [MODEL]
    assert client.models.retrieve(MODEL) == models[0]
    assert models[0].object == "model"


# --- faults and deadlines --------------------------------------------------------------------------------------------


def read_until_error(stream: Any) -> tuple[str, openai.APIError]:
    text = ""
    try:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    except openai.APIError as error:
        return text, error
    pytest.fail("the stream ended without an error")


@pytest.mark.parametrize(
    ("fault", "code"), [("fail_after_tokens", "internal_error"), ("die_after_tokens", "engine_died")]
)
def test_a_fault_in_a_stream_raises_after_the_good_chunks(
    client: openai.OpenAI, serve: Any, fault: str, code: str
) -> None:
    good = chat_text(chat(client, max_tokens=8))
    warm_up = 2 if fault == "die_after_tokens" else 0
    service = serve({"engine": {"sim": {fault: 8 + warm_up}}})
    with service.client() as faulty:
        text, error = read_until_error(chat(faulty, stream=True))
    assert text == good
    assert error.code == code
    assert not isinstance(error, openai.APIConnectionError)


def test_a_fault_before_the_first_token_is_a_status(serve: Any) -> None:
    service = serve({"engine": {"sim": {"fail_after_tokens": 0}}})
    with service.client() as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as raised:
                chat(client, stream=stream)
            assert (raised.value.status_code, raised.value.code) == (500, "internal_error")


def test_a_dead_engine_is_a_503_and_not_ready(serve: Any) -> None:
    service = serve({"engine": {"sim": {"die_after_tokens": 3}}})
    with service.client() as client:
        with pytest.raises(openai.InternalServerError) as raised:
            chat(client)
        assert (raised.value.status_code, raised.value.code) == (503, "engine_died")
        with pytest.raises(openai.InternalServerError) as raised:
            chat(client)
        assert (raised.value.status_code, raised.value.code) == (503, "engine_died")
        with pytest.raises(openai.InternalServerError) as raised:
            client.get(f"{service.url}/ready", cast_to=object)
        assert (raised.value.status_code, raised.value.code) == (503, "not_ready")


def test_a_fault_of_one_choice_ends_the_other_choices(serve: Any) -> None:
    service = serve({"engine": {"sim": {"fail_after_tokens": 8}}})
    with service.client() as client:
        with pytest.raises(openai.InternalServerError):
            chat(client, n=3)
        read_until_error(chat(client, n=3, stream=True))
    load = service.wait_idle()
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)


def test_a_deadline_before_the_first_byte_is_a_504(serve: Any) -> None:
    service = serve({"gateway": {"request_timeout_s": 0.3}, "engine": {"sim": {"stall_after_tokens": 0}}})
    with service.client() as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as raised:
                chat(client, stream=stream)
            assert (raised.value.status_code, raised.value.code) == (504, "deadline_exceeded")
            assert raised.value.type == "timeout_error"
    load = service.wait_idle()
    assert (load.running, load.kv_usage) == (0, 0.0)


def test_a_deadline_after_the_first_byte_is_an_error_event(client: openai.OpenAI, serve: Any) -> None:
    service = serve({"gateway": {"request_timeout_s": 0.5}, "engine": {"sim": {"stall_after_tokens": 8}}})
    with service.client() as late:
        text, error = read_until_error(chat(late, stream=True))
    assert text == chat_text(chat(client, max_tokens=8))
    assert error.code == "deadline_exceeded"
    load = service.wait_idle()
    assert (load.running, load.kv_usage) == (0, 0.0)


# --- clients that leave ----------------------------------------------------------------------------------------------


@pytest.fixture
def slow_path(serve: Any) -> Any:
    return serve({"engine": {"sim": {"step_ms": 50.0}}})


def test_a_client_that_leaves_mid_stream_frees_the_engine(slow_path: Any) -> None:
    with slow_path.client() as client, chat(client, stream=True, max_tokens=2000) as stream:
        chunks = iter(stream)
        next(chunks)
        next(chunks)
        load = slow_path.load()
        assert load.running == 1
        assert load.kv_usage > 0
    load = slow_path.wait_idle()
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)


def test_a_client_that_leaves_an_unstreamed_request_frees_the_engine(slow_path: Any) -> None:
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 2000, "n": 3}).encode()
    with slow_path.connect() as connection:
        connection.sendall(post("/v1/chat/completions", body))
        slow_path.wait_busy(3)
    load = slow_path.wait_idle()
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)


def test_a_client_that_gives_up_waiting_frees_the_engine(slow_path: Any) -> None:
    with slow_path.client(timeout=0.3) as client, pytest.raises(openai.APITimeoutError):
        chat(client, max_tokens=2000)
    load = slow_path.wait_idle()
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)


async def test_a_cancelled_task_of_the_async_client_frees_the_engine(slow_path: Any) -> None:
    async with slow_path.async_client() as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2000, stream=True)
        await anext(aiter(stream))
        await stream.close()
    load = slow_path.wait_idle()
    assert (load.running, load.kv_usage) == (0, 0.0)


def test_a_client_that_leaves_while_it_waits_for_a_slot_frees_its_place(serve: Any) -> None:
    service = serve({"engine": {"sim": {"step_ms": 50.0, "max_sequences": 1}}})
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 2000}).encode()
    with contextlib.ExitStack() as connections:
        for _ in range(4):
            connection = connections.enter_context(service.connect())
            connection.sendall(post("/v1/chat/completions", body))
        service.wait_busy(4)
    load = service.wait_idle()
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)


def test_a_client_that_does_not_read_is_ended_by_the_deadline(serve: Any) -> None:
    """`request_timeout_s` is "from arrival to last byte"; a reader that stalls may not hold the gateway for ever."""
    service = serve({"gateway": {"request_timeout_s": 1.0}, "engine": {"sim": {"step_ms": 0.0}}})
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8000, "stream": True}
    body = json.dumps(fields | {"logprobs": True, "top_logprobs": 20, "n": 8}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(10)
        connection.connect(("127.0.0.1", service.port))
        connection.sendall(post("/v1/chat/completions", body))
        service.wait_busy()
        ended = service.run(_ended_within(service, 6.0))
    assert ended, "the request outlived its deadline because its client does not read"


async def _ended_within(service: Any, limit_s: float) -> bool:
    try:
        await asyncio.wait_for(service.watched.idle.wait(), limit_s)
    except TimeoutError:
        return False
    return True
