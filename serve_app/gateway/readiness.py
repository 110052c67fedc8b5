"""Whether the whole path has served: a warm-up chat through every hop, repeated until it is answered.

A process that has started is not ready. Knows nothing of HTTP.
"""

import asyncio
import logging
import time
import uuid
from contextlib import aclosing

from serve_app.aio import task_count
from serve_app.config import AppConfig
from serve_app.errors import NotReady
from serve_app.gateway.inbound import from_chat
from serve_app.gateway.recording import Recording
from serve_app.gateway.schema import ChatBody, MessageBody
from serve_app.messages import PathReport, RequestContext
from serve_app.path import Hops, answer

logger = logging.getLogger(__name__)

_WARM_UP_DEADLINE_S = 120.0
_RETRY_S = 1.0
_PROBE_TIMEOUT_S = 5.0


class Readiness:
    """Not ready until `warm_up` has returned."""

    def __init__(self, config: AppConfig, hops: Hops) -> None:
        self._config = config
        self._hops = hops
        self._warm = False
        self._reason = "the warm-up has not begun"

    async def warm_up(self) -> None:
        """Sends chats until one is answered. Returns then, and never raises a RequestError."""
        body = ChatBody(model=self._config.model.name, messages=[MessageBody(role="user", content="Hi")], max_tokens=2)
        inbound = from_chat(body, self._config.gateway)
        while not self._warm:
            now_s, request_id = time.time(), f"warm-up-{uuid.uuid4().hex}"
            context = RequestContext(request_id, now_s + _WARM_UP_DEADLINE_S)
            # Nobody's request: it is in no trace, and its recording goes nowhere.
            recording = Recording(request_id, "chat", self._config.model.name, now_s)
            try:
                async with aclosing(answer(inbound, context, self._hops, recording)) as chunks:
                    async for _ in chunks:
                        pass
                self._warm = True
            except Exception as error:  # noqa: BLE001 - whatever it was, a replica that stops trying is never ready
                self._reason = f"the warm-up fails: {error}"
                logger.warning("warm-up failed, trying again: %s", error)
                await asyncio.sleep(_RETRY_S)

    def require(self) -> None:
        """Raises NotReady before the warm-up was answered."""
        if not self._warm:
            raise NotReady(f"Not ready: {self._reason}.", retry_after_s=_RETRY_S)

    async def probe(self) -> PathReport:
        """Asks an engine's load through the path. Raises NotReady where that is cold or silent."""
        self.require()
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                return (await self._hops.postprocess.report()).with_tasks("gateway", task_count())
        except Exception as error:
            reason = str(error) or f"no answer within {_PROBE_TIMEOUT_S:g} s"
            raise NotReady(f"Not ready: no engine answers ({reason}).", retry_after_s=_RETRY_S) from error
