"""Log lines as JSON, one object a line, each with the ids of the request and the trace it belongs to.

`bind` names the request that the running task works on; every line of ours that is written meanwhile carries its ids.
"""

import json
import logging
import sys
import time
from contextvars import ContextVar

import msgspec

# Loggers of ours; those of Ray and vLLM keep their own formats.
_OURS = ("serve_app", "deployments")

_context: ContextVar[tuple[str, str | None]] = ContextVar("tokenline_request")


def bind(request_id: str, trace_id: str | None) -> None:
    """From here on the running task works on this request."""
    _context.set((request_id, trace_id))


class JsonFormatter(logging.Formatter):
    """`time` (UTC), `level`, `hop`, `replica`, `logger`, `message`, ids, `error` with its traceback, and `fields`."""

    def __init__(self, hop: str, replica: str) -> None:
        super().__init__()
        self._process = {"hop": hop, "replica": replica}

    def format(self, record: logging.LogRecord) -> str:
        """One line without its newline."""
        request_id, trace_id = _context.get(("", None))
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname}
        line |= self._process | {"logger": record.name, "message": record.getMessage()}
        line |= {"request_id": request_id} if request_id else {}
        line |= {"trace_id": trace_id} if trace_id else {}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line).decode()
        except (TypeError, UnicodeEncodeError):  # half a surrogate pair, or something that has no JSON
            return json.dumps(line, default=str)


def set_up(hop: str, replica: str) -> None:
    """Once per process: our loggers write JSON to standard error, from INFO up, and nowhere else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(hop, replica))
    for name in _OURS:
        ours = logging.getLogger(name)
        ours.handlers = [handler]
        ours.setLevel(logging.INFO)
        ours.propagate = False
