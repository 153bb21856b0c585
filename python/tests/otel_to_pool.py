"""GenAI spans by OpenTelemetry's own SDK and exporter, as they ship: SINEW_URL, SINEW_TOKEN."""

import json
import os

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

exporter = OTLPSpanExporter(
    endpoint=os.environ["SINEW_URL"] + "/v1/traces",
    headers={"authorization": "Bearer " + os.environ["SINEW_TOKEN"]},
)
provider = TracerProvider(resource=Resource.create({"service.name": "walker"}))
provider.add_span_processor(BatchSpanProcessor(exporter))
tracer = provider.get_tracer("agent")


def text(role, content):
    return {"role": role, "parts": [{"type": "text", "content": content}]}


history = [text("user", "A.>")]
with tracer.start_as_current_span("invoke_agent walker") as root:
    root.set_attribute("gen_ai.operation.name", "invoke_agent")
    root.set_attribute("sinew.task", "walk")
    for picture in (".A>", None):
        with tracer.start_as_current_span("chat policy") as span:
            said = text("assistant", "r")
            span.set_attributes(
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.request.model": "policy",
                    "gen_ai.input.messages": json.dumps(history),
                    "gen_ai.output.messages": json.dumps([{**said, "finish_reason": "stop"}]),
                }
            )
        history.append(said)
        if picture:
            part = {"type": "tool_call_response", "id": "c", "response": picture}
            history.append({"role": "tool", "parts": [part]})
    root.add_event(
        "gen_ai.evaluation.result",
        {"gen_ai.evaluation.name": "goal", "gen_ai.evaluation.score.value": 1.0},
    )
assert provider.force_flush(20_000)
provider.shutdown()
print("ok")
