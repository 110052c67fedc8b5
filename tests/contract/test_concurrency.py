"""Many streams at once: none fails, none gets a token of another, and nothing is left when they have gone.

The simulated engine runs in `echo` mode: a stream repeats its own prompt's ids, so its text says whose it is.
"""

import asyncio
import collections
import contextlib
import json
import os
from typing import Any

import openai
import pytest
from raw_http import post

MODEL = "simulated"

# A longer run: TOKENLINE_CONCURRENCY_ROUNDS=100 make test
ROUNDS = int(os.environ.get("TOKENLINE_CONCURRENCY_ROUNDS", "2"))
CLIENTS = int(os.environ.get("TOKENLINE_CONCURRENCY_CLIENTS", "64"))


@pytest.fixture
def echoing(serve: Any) -> Any:
    # Slow enough steps that all streams are open together.
    return serve({"engine": {"sim": {"source": "echo", "step_ms": 10.0}}})


async def ids_of(service: Any, text: str) -> list[int]:
    return list(service.ids(text))


async def read_stream(client: openai.AsyncOpenAI, prompt: Any, max_tokens: int) -> tuple[str, Any]:
    stream = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, stream=True, stream_options={"include_usage": True}
    )
    text, usage, reasons = "", None, []
    async for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
        reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        usage = chunk.usage or usage
    assert reasons == ["length"]
    return text, usage


async def count_tasks() -> int:
    return len(asyncio.all_tasks())


async def settled_tasks(target: int, limit_s: float = 5.0) -> int:
    """Tasks of the server's loop once they are down to `target`, or after `limit_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while await count_tasks() > target:
                others = asyncio.all_tasks() - {asyncio.current_task()}
                await asyncio.wait(others, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
    return await count_tasks()


async def test_many_streams_at_once_get_their_own_tokens_only(echoing: Any) -> None:
    prompts = [f"client {number} says {number * 7919}; " for number in range(CLIENTS)]
    ids = [await ids_of(echoing, prompt) for prompt in prompts]
    async with echoing.async_client(timeout=120.0) as client:
        await read_stream(client, prompts[0], 1)
        before = echoing.run(count_tasks())
        for _ in range(ROUNDS):
            # A client of its own length each, as text or as ids, so that streams end at different times.
            wanted = [2 * len(own) + number % 5 for number, own in enumerate(ids)]
            answers = await asyncio.gather(
                *(
                    read_stream(client, prompts[number] if number % 2 else ids[number], wanted[number])
                    for number in range(CLIENTS)
                )
            )
            for number, (text, usage) in enumerate(answers):
                own = ids[number]
                expected = echoing.vocabulary.decode([own[at % len(own)] for at in range(wanted[number])])
                assert text == expected, f"client {number}"
                assert (usage.prompt_tokens, usage.completion_tokens) == (len(own), wanted[number])
            load = await asyncio.to_thread(echoing.wait_idle)
            assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)
    assert echoing.run(settled_tasks(before)) <= before


async def test_the_streams_run_together_in_the_engine(echoing: Any) -> None:
    most = 0

    async def watch(until: asyncio.Event) -> None:
        nonlocal most
        while not until.is_set():
            most = max(most, (await asyncio.to_thread(echoing.load)).running)

    async with echoing.async_client(timeout=120.0) as client:
        done = asyncio.Event()
        watching = asyncio.create_task(watch(done))
        await asyncio.gather(*(read_stream(client, f"client {number}", 40) for number in range(CLIENTS)))
        done.set()
        await watching
    assert most > CLIENTS // 2


async def test_choices_of_one_request_do_not_mix(echoing: Any) -> None:
    prompts = [f"prompt {number} of many" for number in range(32)]
    ids = [await ids_of(echoing, prompt) for prompt in prompts]
    async with echoing.async_client(timeout=120.0) as client:
        stream = await client.completions.create(model=MODEL, prompt=prompts, max_tokens=20, n=2, stream=True)
        texts = [""] * 64
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    for index, text in enumerate(texts):
        own = ids[index // 2]
        assert text == echoing.vocabulary.decode([own[at % len(own)] for at in range(20)])


async def test_same_request_ids_at_the_same_time_do_not_mix(echoing: Any) -> None:
    """The id comes from the client, who may repeat it."""
    async with echoing.async_client(default_headers={"x-request-id": "the-same"}, timeout=120.0) as client:
        prompts = [f"twin {number} of sixteen" for number in range(16)]
        answers = await asyncio.gather(*(read_stream(client, prompt, 20) for prompt in prompts))
    for prompt, (text, _) in zip(prompts, answers, strict=True):
        own = await ids_of(echoing, prompt)
        assert text == echoing.vocabulary.decode([own[at % len(own)] for at in range(20)])


async def test_clients_that_leave_do_not_disturb_those_that_stay(echoing: Any) -> None:
    async def leave(number: int) -> None:
        # Not by the client library: it leaves generators of httpx half read, for the garbage collector to complain of.
        fields = {"model": MODEL, "prompt": f"leaver {number}", "max_tokens": 4000, "stream": True}
        reader, writer = await asyncio.open_connection("127.0.0.1", echoing.port)
        writer.write(post("/v1/completions", json.dumps(fields).encode()))
        events = 0
        while events < 1 + number % 4:
            assert (line := await reader.readline()), "the stream broke off"
            events += line.startswith(b"data: ")
        writer.close()

    prompts = [f"stayer {number} reads all" for number in range(CLIENTS // 2)]
    async with echoing.async_client(timeout=120.0) as client:
        before = echoing.run(count_tasks())
        staying = [asyncio.create_task(read_stream(client, prompt, 60)) for prompt in prompts]
        await asyncio.gather(*(leave(number) for number in range(CLIENTS // 2)))
        answers = await asyncio.gather(*staying)
        for prompt, (text, _) in zip(prompts, answers, strict=True):
            own = await ids_of(echoing, prompt)
            assert text == echoing.vocabulary.decode([own[at % len(own)] for at in range(60)])
        load = await asyncio.to_thread(echoing.wait_idle)
        assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)
        assert echoing.run(settled_tasks(before)) <= before
        # That the engine came to rest is not enough: it would too once it had made all that nobody reads.
        outcomes = collections.Counter(one.outcome for one in await asyncio.to_thread(echoing.requests, last=CLIENTS))
        assert outcomes == {"ok": CLIENTS // 2, "disconnected": CLIENTS // 2}
