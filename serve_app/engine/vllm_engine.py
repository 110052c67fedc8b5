"""The real engine: vLLM's AsyncLLM, token ids in, token ids out. The only file that imports vllm.

vLLM's scheduler and workers run in processes of their own; this object lives in the replica's event loop and talks to
them.
"""

import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from serve_app.config import EngineSection, ModelSection
from serve_app.engine.vllm_args import vllm_args
from serve_app.errors import ConfigError, EngineDied, InvalidRequest, OutOfMemory, Overloaded, RequestError
from serve_app.messages import EngineDelta, EngineRequest, EngineTimes, LoadReport, Sampling, TokenLogprob
from serve_app.model import context_tokens, locate

logger = logging.getLogger(__name__)

# vLLM takes a seed of -1 for no seed at all; here it is a seed like any other.
_SEED_FOR_MINUS_ONE = (1 << 62) - 1


class VllmEngine:
    """One vLLM engine. Imports vLLM when it starts, after the environment is set.

    With `export_metrics` vLLM's own metrics are Ray's too (`ray_vllm_…`, see `docs/metrics.md`); only in a Ray process.
    """

    def __init__(self, model: ModelSection, engine: EngineSection, export_metrics: bool = False) -> None:
        self._model = model
        self._config = engine
        self._export_metrics = export_metrics
        self._llm: Any = None
        self._stats = _LastStats()

    async def start(self) -> None:
        """Loads the model, which takes seconds to minutes and blocks this event loop. Raises ConfigError."""
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.update(self._config.environment)
        from vllm import AsyncEngineArgs  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        arguments = vllm_args(self._model, self._config, locate(self._model.source), context_tokens(self._model))
        unknown = sorted(set(arguments) - set(AsyncEngineArgs.__dataclass_fields__))
        if unknown:
            raise ConfigError(f"engine.vllm_args.{unknown[0]}: vLLM has no such engine argument")
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=self._stat_loggers())
        except ValueError as error:  # vLLM's pydantic and its own checks both raise this for wrong arguments
            raise ConfigError(f"engine: vLLM refuses the configuration: {error}") from error

    def _stat_loggers(self) -> list[Any]:
        """Ray's takes the place of vLLM's Prometheus logger, which nothing here would serve."""
        if not self._export_metrics:
            return [self._stats.logger]
        from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger  # noqa: PLC0415

        return [self._stats.logger, RayPrometheusStatLogger]

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """See `Engine.generate`."""
        from vllm import TokensPrompt  # noqa: PLC0415
        from vllm.exceptions import GracefulHTTPError, VLLMClientError  # noqa: PLC0415
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

        prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids))
        try:
            stream = self._llm.generate(
                prompt, sampling_params(request.sampling, request.max_tokens), request.engine_request_id
            )
            first = True
            async with aclosing(stream):
                async for output in stream:
                    yield _delta(output, request.sampling, first)
                    first = False
        except VLLMClientError as error:
            raise InvalidRequest(str(error), getattr(error, "parameter", None)) from error
        except GracefulHTTPError as error:
            raise Overloaded(error.message) from error
        except EngineDeadError as error:
            if is_out_of_memory(error):
                raise OutOfMemory("The engine died for want of memory while it worked on this request.") from error
            raise EngineDied("The engine died while it worked on this request.") from error
        except RequestError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemory("The engine ran out of memory on this request.") from None
            # An exception of vLLM's own cannot cross the hop: the postprocessor would import vLLM to read it.
            logger.exception("request %s failed in vLLM", request.engine_request_id)
            raise RuntimeError(f"vLLM failed: {type(error).__name__}: {error}") from None

    async def load(self) -> LoadReport:
        """See `Engine.load`."""
        if self._llm is None or self._llm.errored:
            raise EngineDied("The engine is dead.")
        return self._stats.report()

    async def stop(self) -> None:
        """See `Engine.stop`."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()


class _LastStats:
    """What vLLM's scheduler said of itself last: after every step, and when the last request has gone.

    Its counts are those of one step and are summed here; emptying the prefix cache does not reset them (vLLM 0.32,
    `KVCacheManager.make_prefix_cache_stats`, `IterationStats`). The prefix cache's are in tokens, of a request's first
    lookup only; a preemption is told with the next token of the request that suffered it.
    """

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._vllm_config: Any = None
        self._preemptions = 0
        self._prefix_queries_tokens = 0
        self._prefix_hits_tokens = 0

    def logger(self, vllm_config: Any, engine_index: int = 0) -> Any:
        """Factory that vLLM calls once per engine; returns a `StatLoggerBase`."""
        from vllm.v1.metrics.loggers import StatLoggerBase  # noqa: PLC0415

        last = self
        last._vllm_config = vllm_config

        class Recorder(StatLoggerBase):  # type: ignore[misc]  # vllm is not type-checked here
            def __init__(self) -> None:
                self.engine_index = engine_index

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
            ) -> None:
                last.take(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None: ...

        return Recorder()

    def take(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """One step's `SchedulerStats` and `IterationStats`; None is no news."""
        if scheduler_stats is not None:
            self._scheduler = scheduler_stats
            self._prefix_queries_tokens += scheduler_stats.prefix_cache_stats.queries
            self._prefix_hits_tokens += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs

    def report(self) -> LoadReport:
        """The engine's load; before its first step it has none."""
        blocks = self._vllm_config.cache_config.num_gpu_blocks or 0
        if self._scheduler is None:
            return LoadReport(running=0, waiting=0, kv_usage=0.0, kv_blocks=blocks)
        return LoadReport(
            running=self._scheduler.num_running_reqs,
            waiting=self._scheduler.num_waiting_reqs + self._scheduler.num_skipped_waiting_reqs,
            kv_usage=self._scheduler.kv_cache_usage,
            kv_blocks=blocks,
            preemptions=self._preemptions,
            prefix_queries_tokens=self._prefix_queries_tokens,
            prefix_hits_tokens=self._prefix_hits_tokens,
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is torch's error (`torch.OutOfMemoryError`, "CUDA out of memory"), the allocator's, or Python's.

    Looked for along the chain of causes, and by its words, since vLLM carries errors between its processes as text.
    """
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, MemoryError) or "out of memory" in str(chain).lower():
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def sampling_params(sampling: Sampling, max_tokens: int) -> Any:
    """vLLM's `SamplingParams`: ids only (`detokenize=False`), and only what is new in each output."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=_SEED_FOR_MINUS_ONE if sampling.seed == -1 else sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        logit_bias=sampling.logit_bias,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _delta(output: Any, sampling: Sampling, first: bool) -> EngineDelta:
    """vLLM's RequestOutput as ours; `first` of its request."""
    completion = output.outputs[0]
    reason = completion.finish_reason
    if reason in ("abort", "error"):
        raise EngineDied(f"The engine gave this request up ({reason}).")
    stopped = reason is not None and reason != "length"
    logprobs = None
    if sampling.logprobs is not None and completion.logprobs is not None:
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        logprobs = tuple(_token_logprob(token_id, candidates, sampling.logprobs) for token_id, candidates in pairs)
    return EngineDelta(
        token_ids=tuple(completion.token_ids),
        finish_reason=None if reason is None else "stop" if stopped else "length",
        ends_with_stop_token=stopped,
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(output, sampling.prompt_logprobs),
        cached_tokens=output.num_cached_tokens or 0,
        times=_times(output.metrics) if first or reason is not None else None,
    )


def _token_logprob(token_id: int, candidates: Any, count: int) -> TokenLogprob:
    """`candidates` maps ids to vLLM's Logprob: the `count` likeliest, and the token itself if not among them."""
    likeliest = sorted(candidates.items(), key=lambda item: item[1].rank)[:count]
    return TokenLogprob(token_id, candidates[token_id].logprob, tuple((id_, one.logprob) for id_, one in likeliest))


def _prompt_logprobs(output: Any, count: int | None) -> tuple[TokenLogprob | None, ...] | None:
    if count is None or not output.prompt_logprobs:
        return None
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return tuple(
        None if candidates is None else _token_logprob(token_id, candidates, count) for token_id, candidates in pairs
    )


def _times(metrics: Any) -> EngineTimes | None:
    """vLLM stamps with the monotonic clock of its host; 0 means it never happened."""
    if metrics is None:
        return None
    shift = time.time() - time.monotonic()
    stamps = (metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts)
    return EngineTimes(*(stamp + shift if stamp else None for stamp in stamps))
