"""What is pushed to the postprocessor's sink: in which order, where it fails, and after an engine that ends badly."""

import asyncio
from typing import Any

import pytest
from scripted_engine import ENDLESS, UNTRACED, ScriptedEngine, bytes_of, events_of, said, streamed, whole
from streams import collected

from serve_app.errors import BacklogFull, EngineDied
from serve_app.messages import Closing, RequestKind
from serve_app.postprocess.service import PostprocessService
from serve_app.vocabulary import Vocabulary


class Refusing:
    """A sink that takes so many items and refuses all after them."""

    def __init__(self, takes: int) -> None:
        self.taken: list[Any] = []
        self._takes = takes

    def __call__(self, item: bytes | Closing) -> None:
        if len(self.taken) == self._takes:
            raise BacklogFull("not read")
        self.taken.append(item)


def test_the_choices_chunks_come_in_the_order_in_which_the_engine_makes_their_tokens(ask: Any, answer: Any) -> None:
    slow, fast = [2, *said("a")[:-1], 2, *said("b", "length")], [1, *said("c")[:-1], 2, *said("d", "length")]
    chunks = answer(ScriptedEngine(slow, fast), ask(RequestKind.COMPLETION, n=2, stream=True))
    texts = [choice["text"] for event in events_of(chunks) for choice in event["choices"] if choice["text"]]
    assert texts == ["c", "a", "d", "b"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("takes", [0, 1, 7])
def test_a_sink_that_fails_ends_the_request_with_its_error_and_every_engine_stream(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any, takes: int, n: int
) -> None:
    async def main() -> None:
        engine, sink = ScriptedEngine(ENDLESS), Refusing(takes)
        with pytest.raises(BacklogFull, match="not read"):
            await PostprocessService(byte_vocabulary, engine, UNTRACED).generate(ask(n=n, stream=True), sink)
        assert len(sink.taken) == takes
        assert all(engine.closed)
        assert sum(engine.given) <= takes + n
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_sink_that_refuses_any_item_ends_the_request_with_its_error(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any, stream: bool
) -> None:
    async def main() -> None:
        service = PostprocessService(byte_vocabulary, ScriptedEngine(said("ab")), UNTRACED)
        for takes in range(len(await collected(service, ask(stream=stream)))):
            with pytest.raises(BacklogFull):
                await service.generate(ask(stream=stream), Refusing(takes))
            assert service.in_flight == 0

    run_virtual(main())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_what_goes_wrong_in_the_engine_once_a_choice_is_whole_is_not_its_clients(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any, n: int, stream: bool
) -> None:
    async def main() -> None:
        engine = ScriptedEngine([*said("hello"), EngineDied("lost after its last token")], [1, *said("world")])
        service = PostprocessService(byte_vocabulary, engine, UNTRACED)
        chunks = [bytes_of(item) for item in await collected(service, ask(n=n, stream=stream))]
        expected = {0: ("hello", "stop"), 1: ("world", "stop")}
        assert (streamed if stream else whole)(chunks) == {index: expected[index] for index in range(n)}

    run_virtual(main())


@pytest.mark.parametrize("n", [1, 2])
def test_a_last_chunk_that_the_sink_refused_is_not_taken_for_sent(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any, n: int
) -> None:
    async def main() -> None:
        refused: list[bytes] = []

        def sink(item: bytes | Closing) -> None:
            if not refused and b'"finish_reason":"stop"' in bytes_of(item):
                refused.append(bytes_of(item))
                raise BacklogFull("not read just now")

        with pytest.raises(BacklogFull):
            await PostprocessService(byte_vocabulary, ScriptedEngine(said("hi")), UNTRACED).generate(
                ask(n=n, stream=True), sink
            )
        assert refused

    run_virtual(main())
