"""GPUs through NVML: a stand-in module with the same functions, errors and return types as `pynvml`."""

from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.engine.gpu import GpuSampler

GIB = 1 << 30


class FakeError(Exception):
    """Like `pynvml.NVMLError`: `value` is the return code."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class FakeNvml:
    """Two GPUs and a MIG instance of the second. `faults` maps (function, uuid) to the code that it fails with."""

    NVMLError = FakeError
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 3, 4
    NVML_ERROR_FUNCTION_NOT_FOUND, NVML_ERROR_GPU_IS_LOST = 13, 15

    def __init__(self, init_fails: bool = False) -> None:
        self.init_fails = init_fails
        self.calls: list[str] = []
        self.faults: dict[tuple[str, str], int] = {}
        self.used = {"GPU-aaa-1": 10 * GIB, "GPU-bbb-2": 20 * GIB, "MIG-ccc-3": 5 * GIB}

    def _call(self, function: str, uuid: str) -> None:
        self.calls.append(function)
        if (code := self.faults.get((function, uuid))) is not None:
            raise FakeError(code)

    def nvmlInit(self) -> None:
        self._call("init", "")
        if self.init_fails:
            raise FakeError(9)

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index > 1:
            raise FakeError(2)
        return ["GPU-aaa-1", "GPU-bbb-2"][index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.used:
            raise FakeError(6)
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return {"GPU-aaa-1": 0, "GPU-bbb-2": 1, "MIG-ccc-3": 0}[handle]

    def nvmlDeviceGetName(self, handle: str) -> str:
        self._call("name", handle)
        return f"NVIDIA {handle}"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._call("rates", handle)
        return SimpleNamespace(gpu=87, memory=43)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._call("memory", handle)
        return SimpleNamespace(used=self.used[handle], total=80 * GIB, free=0)


def sampler(nvml: Any, visible: str | None = None) -> GpuSampler:
    return GpuSampler(nvml, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


def names(nvml: Any, visible: str | None) -> list[str]:
    return [report.name.removeprefix("NVIDIA ") for report in sampler(nvml, visible).sample()]


def test_a_sample_has_both_rates_and_the_memory() -> None:
    report = sampler(FakeNvml()).sample()[0]
    assert (report.index, report.name) == (0, "NVIDIA GPU-aaa-1")
    assert (report.compute, report.memory_bandwidth) == (0.87, 0.43)
    assert (report.used_bytes, report.total_bytes) == (10 * GIB, 80 * GIB)


def test_peak_and_mean_are_over_all_samples() -> None:
    nvml = FakeNvml()
    gpus = sampler(nvml, "0")
    for used in (10, 40, 10):
        nvml.used["GPU-aaa-1"] = used * GIB
        (report,) = gpus.sample()
    assert (report.used_bytes, report.peak_bytes, report.mean_bytes) == (10 * GIB, 40 * GIB, 20 * GIB)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-aaa-1", "GPU-bbb-2"]),
        ("", []),
        ("-1", []),
        ("1", ["GPU-bbb-2"]),
        ("1, 0", ["GPU-bbb-2", "GPU-aaa-1"]),
        ("0,7,1", ["GPU-aaa-1"]),
        ("0,-1,1", ["GPU-aaa-1"]),
        ("GPU-bbb-2", ["GPU-bbb-2"]),
        ("GPU-bbb", ["GPU-bbb-2"]),
        ("GPU-zzz", []),
        ("MIG-ccc-3", ["MIG-ccc-3"]),
    ],
)
def test_the_replicas_gpus_are_those_that_cuda_shows_it(visible: str | None, expected: list[str]) -> None:
    assert names(FakeNvml(), visible) == expected


def test_without_a_visible_gpu_the_driver_is_not_even_loaded() -> None:
    nvml = FakeNvml()
    assert sampler(nvml, "").sample() == ()
    assert nvml.calls == []


def test_without_a_driver_there_are_no_reports_and_it_is_asked_once() -> None:
    nvml = FakeNvml(init_fails=True)
    gpus = sampler(nvml)
    assert [gpus.sample() for _ in range(3)] == [(), (), ()]
    assert nvml.calls == ["init"]


def test_without_the_library_there_are_no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("serve_app.engine.gpu.importlib.import_module", absent)
    assert sampler(None).sample() == ()


def test_on_this_machine_the_real_library_is_quiet() -> None:
    assert GpuSampler(environment={"CUDA_VISIBLE_DEVICES": ""}).sample() == ()


@pytest.mark.parametrize("code", [3, 4, 13])
def test_what_a_gpu_does_not_offer_is_unknown(code: int) -> None:
    nvml = FakeNvml()
    nvml.faults["rates", "MIG-ccc-3"] = code
    (report,) = sampler(nvml, "MIG-ccc-3").sample()
    assert (report.compute, report.memory_bandwidth) == (None, None)
    assert report.used_bytes == 5 * GIB
    nvml.faults["memory", "MIG-ccc-3"] = code
    (report,) = sampler(nvml, "MIG-ccc-3").sample()
    assert (report.used_bytes, report.total_bytes, report.peak_bytes, report.mean_bytes) == (None,) * 4


def test_a_lost_gpu_is_left_out_while_it_is_lost_and_the_others_stay() -> None:
    nvml = FakeNvml()
    gpus = sampler(nvml)
    assert len(gpus.sample()) == 2
    nvml.faults["memory", "GPU-aaa-1"] = nvml.NVML_ERROR_GPU_IS_LOST
    assert [report.index for report in gpus.sample()] == [1]
    nvml.faults.clear()
    assert [report.index for report in gpus.sample()] == [0, 1]


def test_a_gpu_that_cannot_be_named_is_left_out() -> None:
    nvml = FakeNvml()
    nvml.faults["name", "GPU-aaa-1"] = nvml.NVML_ERROR_GPU_IS_LOST
    assert names(nvml, None) == ["GPU-bbb-2"]


def test_the_real_module_has_every_name_that_is_used() -> None:
    import pynvml  # noqa: PLC0415

    for name in vars(FakeNvml):
        if name.startswith(("nvml", "NVML")):
            assert hasattr(pynvml, name), name
    assert FakeNvml.NVML_ERROR_NOT_SUPPORTED == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert FakeNvml.NVML_ERROR_NO_PERMISSION == pynvml.NVML_ERROR_NO_PERMISSION
    assert FakeNvml.NVML_ERROR_FUNCTION_NOT_FOUND == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    assert FakeNvml.NVML_ERROR_GPU_IS_LOST == pynvml.NVML_ERROR_GPU_IS_LOST
