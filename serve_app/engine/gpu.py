"""The GPUs of this replica, read through NVML (package nvidia-ml-py). No GPU, driver or library means no reports.

NVML has two rates: `compute` says that some kernel ran, not that the GPU was full. Knows nothing of vLLM or Ray.
"""

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from serve_app.messages import GpuReport

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class _Gpu:
    """One GPU, and its memory over the samples so far."""

    handle: Any
    index: int
    name: str
    peak_bytes: int | None = None
    sum_bytes: int = 0
    samples: int = 0


class GpuSampler:
    """Call it from a thread: each sample is some C calls of about a millisecond that hold the caller.

    The first sample loads the driver's library, and what it finds then is what there is: GPUs do not appear later.
    `nvml` is the module `pynvml`, or one like it; None imports it. Which GPUs are this replica's says
    CUDA_VISIBLE_DEVICES in `environment`: indices, UUIDs or MIG ids; all where it is absent, none where it is empty.
    """

    def __init__(self, nvml: Any = None, environment: Mapping[str, str] = os.environ) -> None:
        self._nvml = nvml
        self._visible = environment.get("CUDA_VISIBLE_DEVICES")
        self._gpus: list[_Gpu] | None = None

    def sample(self) -> tuple[GpuReport, ...]:
        """Each GPU now; one that NVML cannot reach is left out of this sample. Never raises."""
        if self._gpus is None:
            self._gpus = self._found()
        reports = []
        for gpu in self._gpus:
            with suppress(self._nvml.NVMLError):
                reports.append(self._report(gpu))
        return tuple(reports)

    def _found(self) -> list[_Gpu]:
        if self._visible == "":
            return []
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
        except ImportError:
            return []
        except self._nvml.NVMLError as error:
            logger.debug("no GPU is reported: %s", error)
            return []
        return [gpu for handle in self._handles() for gpu in self._described(handle)]

    def _handles(self) -> Iterator[Any]:
        """Handles in the order of CUDA_VISIBLE_DEVICES. CUDA ignores what follows the first wrong entry; so do we."""
        with suppress(self._nvml.NVMLError):
            count = self._nvml.nvmlDeviceGetCount()
            entries = map(str, range(count)) if self._visible is None else self._visible.split(",")
            for entry in map(str.strip, entries):
                if entry.isdecimal():
                    yield self._nvml.nvmlDeviceGetHandleByIndex(int(entry))
                elif entry.startswith(("GPU-", "MIG-")):
                    yield self._nvml.nvmlDeviceGetHandleByUUID(self._whole_uuid(entry, count))
                else:
                    return

    def _whole_uuid(self, entry: str, count: int) -> str:
        """CUDA takes the beginning of a GPU's UUID for the whole; NVML does not."""
        for index in range(count):
            uuid: str = self._nvml.nvmlDeviceGetUUID(self._nvml.nvmlDeviceGetHandleByIndex(index))
            if uuid.startswith(entry):
                return uuid
        return entry

    def _described(self, handle: Any) -> Iterator[_Gpu]:
        """The index is NVML's; that of a MIG instance counts inside its GPU."""
        with suppress(self._nvml.NVMLError):
            yield _Gpu(handle, self._nvml.nvmlDeviceGetIndex(handle), self._nvml.nvmlDeviceGetName(handle))

    def _report(self, gpu: _Gpu) -> GpuReport:
        rates = self._read(self._nvml.nvmlDeviceGetUtilizationRates, gpu.handle)
        memory = self._read(self._nvml.nvmlDeviceGetMemoryInfo, gpu.handle)
        if memory is not None:
            gpu.peak_bytes = max(memory.used, gpu.peak_bytes or 0)
            gpu.sum_bytes += memory.used
            gpu.samples += 1
        return GpuReport(
            index=gpu.index,
            name=gpu.name,
            compute=None if rates is None else rates.gpu / 100,
            memory_bandwidth=None if rates is None else rates.memory / 100,
            used_bytes=None if memory is None else memory.used,
            total_bytes=None if memory is None else memory.total,
            peak_bytes=gpu.peak_bytes,
            mean_bytes=gpu.sum_bytes / gpu.samples if gpu.samples else None,
        )

    def _read(self, function: Callable[[Any], T], handle: Any) -> T | None:
        """None for what this GPU does not offer (a MIG instance has no rates); raises NVMLError where it is lost."""
        nvml = self._nvml
        absent = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        try:
            return function(handle)
        except nvml.NVMLError as error:
            if error.value in absent:
                return None
            raise
