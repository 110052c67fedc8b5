"""The insight's replica: the one process that remembers the latest requests of all gateways."""

from serve_app.config import AppConfig
from serve_app.insight.service import InsightService
from serve_app.messages import HopReport, RequestMetrics


class InsightDeployment:
    """See `serve_app/insight/`. Nothing on the path of a request waits for it."""

    def __init__(self, config: AppConfig) -> None:
        self._service = InsightService(config.insight)

    async def report(self, report: HopReport) -> None:
        await self._service.report(report)

    async def view(self) -> bytes:
        return await self._service.view()

    async def requests(self, last: int | None, request_id: str | None) -> tuple[RequestMetrics, ...]:
        return await self._service.requests(last, request_id)
