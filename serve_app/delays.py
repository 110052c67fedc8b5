"""Deliberate delays (`delays` in the configuration), so that anybody can see where 300 ms show up.

Stand-ins for what a hop works with; the hops themselves know nothing of delays. The simulated engine has its own two.
"""

import asyncio
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.config import DelaysSection
from serve_app.messages import EngineDelta
from serve_app.postprocess.choice import Choice, Update


class _Slow:
    """Everything of `target`, with one method that waits first."""

    def __init__(self, target: Any, method: str, delay_s: float) -> None:
        self._target = target
        self._method = method
        self._delay_s = delay_s

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._target, name)
        if name != self._method:
            return attribute

        def late(*arguments: Any, **options: Any) -> Any:
            time.sleep(self._delay_s)
            return attribute(*arguments, **options)

        return late


class _SlowTokenizer(_Slow):
    def __init__(self, target: Any, delays: DelaysSection) -> None:
        super().__init__(target, "apply_chat_template", delays.template_ms / 1000)
        self.backend_tokenizer = _Slow(target.backend_tokenizer, "encode_batch", delays.encode_ms / 1000)


def slow_tokenizer(tokenizer: Any, delays: DelaysSection) -> Any:
    """The tokenizer, late with its chat template and with encoding where that is asked for."""
    return _SlowTokenizer(tokenizer, delays) if delays.template_ms or delays.encode_ms else tokenizer


def choice_type(delays: DelaysSection) -> type[Choice]:
    """Choices of which each is late with its first text, if that is asked for."""
    if not delays.detokenize_ms:
        return Choice

    class SlowChoice(Choice):
        """See `Choice`."""

        def push(self, delta: EngineDelta) -> Update:
            """See `Choice.push`."""
            if not self.generated:
                time.sleep(delays.detokenize_ms / 1000)
            return super().push(delta)

    return SlowChoice


def slow_writes(app: ASGIApp, delays: DelaysSection) -> ASGIApp:
    """The application, whose responses' first bytes are written late, if that is asked for."""
    if not delays.write_ms:
        return app

    async def slowed(scope: Scope, receive: Receive, send: Send) -> None:
        late = False

        async def late_send(message: Message) -> None:
            nonlocal late
            if message.get("body") and not late:
                late = True
                await asyncio.sleep(delays.write_ms / 1000)
            await send(message)

        await app(scope, receive, late_send)

    return slowed
