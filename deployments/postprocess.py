"""The postprocessor's replica: calls the engine and turns its token ids into response bytes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.handles import EngineHandle
from serve_app.config import AppConfig
from serve_app.messages import GenerateRequest, PathReport
from serve_app.postprocess.service import PostprocessService
from serve_app.vocabulary import Vocabulary, load_tokenizer


class PostprocessDeployment:
    """See `serve_app/postprocess/`."""

    def __init__(self, config: AppConfig, engine: DeploymentHandle[Any]) -> None:
        self._service = PostprocessService(Vocabulary(load_tokenizer(config.model)), EngineHandle(engine))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[bytes, None]:
        # Closed explicitly: a generator that is only dropped would abort its engine request when the collector gets to
        # it.
        async with aclosing(self._service.generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def report(self) -> PathReport:
        return await self._service.report()
