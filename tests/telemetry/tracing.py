"""OpenTelemetry's own SDK for single tests.

A process gets one tracer provider for good, so this one can be switched off: outside the tests that look at spans it
does nothing, as if there were no SDK.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace import TracerProvider as SdkProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Switched(trace.TracerProvider):
    """The SDK's provider while it is on, none while it is off."""

    def __init__(self) -> None:
        self.on = False
        self.exporter = InMemorySpanExporter()
        self.real = SdkProvider()
        self.real.add_span_processor(SimpleSpanProcessor(self.exporter))

    def get_tracer(self, *args: Any, **options: Any) -> trace.Tracer:
        return _Tracer(self, self.real.get_tracer(*args, **options))


class _Tracer(trace.Tracer):
    def __init__(self, provider: Switched, real: trace.Tracer) -> None:
        self._provider = provider
        self._real = real

    def _chosen(self) -> trace.Tracer:
        return self._real if self._provider.on else trace.NoOpTracer()

    def start_span(self, *args: Any, **options: Any) -> trace.Span:
        return self._chosen().start_span(*args, **options)

    def start_as_current_span(self, *args: Any, **options: Any) -> Any:
        return self._chosen().start_as_current_span(*args, **options)


_provider = Switched()


class Traced:
    """The spans that have ended."""

    @property
    def all(self) -> list[ReadableSpan]:
        return list(_provider.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]


@contextmanager
def traced() -> Iterator[Traced]:
    """Spans are recorded meanwhile."""
    if trace.get_tracer_provider() is not _provider:
        trace.set_tracer_provider(_provider)
    _provider.exporter.clear()
    _provider.on = True
    try:
        yield Traced()
    finally:
        _provider.on = False
