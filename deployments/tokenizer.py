"""The tokenizer's replica: one process that renders chat templates and tokenizes."""

from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.replica import ReplicaTelemetry
from serve_app.config import AppConfig
from serve_app.delays import slow_tokenizer
from serve_app.messages import Detokenized, HopReport, RequestContext, TokenIds, Tokenized, TokenizeRequest
from serve_app.model import context_tokens
from serve_app.tokenizer.encoder import PromptEncoder
from serve_app.tokenizer.service import TokenizerService
from serve_app.vocabulary import load_tokenizer


class TokenizerDeployment:
    """See `serve_app/tokenizer/`."""

    async def __init__(self, config: AppConfig, insight: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._telemetry = ReplicaTelemetry(config, "tokenizer", insight)
        tokenizer = slow_tokenizer(load_tokenizer(config.model), config.delays)
        encoder = PromptEncoder(tokenizer, context_tokens(config.model), int(config.tokenizer.cache_mib * (1 << 20)))
        settings = config.tokenizer
        self._service = TokenizerService(encoder, settings.threads, settings.item_timeout_s, self._telemetry.tracing)
        self._telemetry.begin(self._report)

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        return await self._service.tokenize(request)

    async def detokenize(self, context: RequestContext, ids: TokenIds) -> Detokenized:
        return await self._service.detokenize(context, ids)

    async def _report(self) -> HopReport:
        return self._telemetry.report(self._service.in_flight, self._service.queued)

    async def __del__(self) -> None:
        """Ray Serve awaits this when the replica is shut down."""
        await self._telemetry.end()
