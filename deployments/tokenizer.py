"""The tokenizer's replica: one process that renders chat templates and tokenizes."""

from serve_app.config import AppConfig
from serve_app.messages import RequestContext, TokenIds, Tokenized, TokenizeRequest
from serve_app.model import context_tokens
from serve_app.tokenizer.encoder import PromptEncoder
from serve_app.tokenizer.service import TokenizerService
from serve_app.vocabulary import load_tokenizer


class TokenizerDeployment:
    """See `serve_app/tokenizer/`."""

    def __init__(self, config: AppConfig) -> None:
        encoder = PromptEncoder(load_tokenizer(config.model), context_tokens(config.model))
        self._service = TokenizerService(encoder, config.tokenizer.threads, config.tokenizer.item_timeout_s)

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        return await self._service.tokenize(request)

    async def detokenize(self, context: RequestContext, ids: TokenIds) -> str:
        return await self._service.detokenize(context, ids)
