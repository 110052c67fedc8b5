"""The gateway span's attributes, by OpenTelemetry's GenAI and HTTP conventions where they have a name. Pure.

Prompts are put on it only where the configuration says so; stop strings are the user's words too.
"""

from typing import Any

import msgspec

from serve_app.gateway.recording import Recording
from serve_app.messages import RequestMetrics
from serve_app.telemetry.account import Account
from serve_app.telemetry.names import PROVIDER

# What a span may hold of a prompt, in characters.
_MAX_CAPTURED = 32_768
# What it may hold of the name of a model, known or not: as many as a model's name may have (`config.py`).
_MAX_MODEL = 256


def request_attributes(recording: Recording, capture_content: bool) -> dict[str, Any]:
    """What was asked for; None is left out."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": recording.operation,
        "gen_ai.provider.name": PROVIDER,
        "http.request.method": "POST",
        "tokenline.request_id": recording.request_id,
    }
    if (inbound := recording.inbound) is None:
        return attributes
    sampling = inbound.sampling
    attributes |= {
        "gen_ai.request.model": inbound.model[:_MAX_MODEL],
        "gen_ai.request.max_tokens": inbound.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": inbound.n,
        "gen_ai.request.stream": inbound.stream,
    }
    if capture_content:
        prompt = inbound.messages if inbound.messages is not None else inbound.prompts
        attributes["gen_ai.input.messages"] = msgspec.json.encode(prompt).decode()[:_MAX_CAPTURED]
        attributes["gen_ai.request.stop_sequences"] = list(inbound.stop)
    return attributes


def response_attributes(recording: Recording, metrics: RequestMetrics, numbers: Account) -> dict[str, Any]:
    """What came of it; None is left out. Token usage stands on this span only."""
    reasons = [choice.finish_reason for choice in metrics.choices if choice.finish_reason is not None]
    return {
        "http.response.status_code": recording.status or None,
        "gen_ai.response.model": metrics.model or None,
        "gen_ai.response.finish_reasons": reasons or None,
        "gen_ai.response.time_to_first_chunk": numbers.ttft_s,
        "gen_ai.usage.input_tokens": metrics.prompt_tokens,
        "gen_ai.usage.output_tokens": metrics.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": metrics.cached_tokens,
        "tokenline.outcome": metrics.outcome,
        "tokenline.length": numbers.length,
        "tokenline.stop_string": any(choice.stop_string for choice in metrics.choices) if metrics.choices else None,
        "tokenline.tpot_s": numbers.tpot_s,
        "tokenline.longest_gap_s": numbers.longest_gap_s,
        "tokenline.unaccounted_s": numbers.unaccounted_s,
    }
