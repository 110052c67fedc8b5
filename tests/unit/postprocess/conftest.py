"""What tests of the postprocess hop share: requests, and their answers over a scripted engine."""

from typing import Any

import pytest
from scripted_engine import UNTRACED, ScriptedEngine, bytes_of
from streams import collected

from serve_app.messages import GenerateRequest, RequestContext, RequestKind, Sampling
from serve_app.postprocess.service import PostprocessService
from serve_app.vocabulary import Vocabulary


@pytest.fixture
def ask(context: RequestContext) -> Any:
    def make(
        kind: RequestKind = RequestKind.CHAT, prompts: tuple[bytes, ...] = (b"p",), **fields: Any
    ) -> GenerateRequest:
        fields.setdefault("sampling", Sampling())
        return GenerateRequest(
            context=context,
            kind=kind,
            model="m",
            created_s=1,
            prompt_ids=tuple(tuple(prompt) for prompt in prompts),
            max_tokens=tuple(range(10, 10 + len(prompts))),
            **fields,
        )

    return make


@pytest.fixture
def answer(byte_vocabulary: Vocabulary, run_virtual: Any) -> Any:
    """Runs a request to its end; gives its chunks as they came."""

    def run(engine: ScriptedEngine, request: GenerateRequest, coalesce_tokens: int = 1) -> list[bytes]:
        async def main() -> list[bytes]:
            service = PostprocessService(byte_vocabulary, engine, UNTRACED, coalesce_tokens=coalesce_tokens)
            items = await collected(service, request)
            return [bytes_of(item) for item in items]

        return run_virtual(main())

    return run
