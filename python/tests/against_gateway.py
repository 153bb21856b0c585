"""The client against a real gateway whose model calls a calculator: SINEW_URL, SINEW_TOKEN."""

import json
import os
import tempfile
import threading

from openai import AsyncOpenAI, OpenAI

import sinew
from sinew import ApiError, Client, Dataset, DatasetError, NoReward, RolloutError, Task

URL, TOKEN = os.environ["SINEW_URL"], os.environ["SINEW_TOKEN"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates arithmetic",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


def raises(kind, function, *needles):
    try:
        function()
    except kind as e:
        assert all(n in str(e) for n in needles), (needles, str(e))
        return e
    raise AssertionError(f"{kind.__name__} was not raised")


@sinew.rollout
def solve(task, base_url, api_key):
    """Two turns: a call, and the answer after its result."""
    model = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": task.prompt}]
    first = model.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    call = first.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"expression": "17 * 23"}
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": task.data["result"]})
    second = model.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    sinew.reward(0.25, turn=1)
    return second.choices[0].message.content == "Answer: 391"


@sinew.rollout
async def solve_async(task, base_url, api_key, rollout):
    model = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": task.prompt}]
    answer = await model.chat.completions.create(model="m", messages=messages)
    assert rollout.id == sinew.current().id
    sinew.reward(0.5, success=True, metrics={"characters": len(answer.choices[0].message.content or "")})


def one_rollout(client):
    result = solve.run(client, Task("one", "What is 17 * 23?", {"result": "391"}), seed=3)
    assert result.ok and result.reward == 1.0, result
    trace = result.trace()
    assert trace.success and trace.reward == 1.0 and trace.end["type"] == "terminated"
    kinds = [node.kind for node in trace.path(trace.leaves()[0])]
    assert kinds == ["prompt", "sampled", "observation", "sampled"], kinds
    sampled = [node for node in trace.nodes if node.kind == "sampled"]
    assert all(len(n.tokens) == len(n.logprobs) > 0 for n in sampled)
    assert trace.sampled_tokens == sum(len(n.tokens) for n in sampled)
    assert sampled[0].raw["process_reward"] == 0.25 and sampled[0].parent == 0
    assert trace.nodes[0].parent is None
    # It is over: the key opens nothing any more.
    late = OpenAI(base_url=result.rollout.base_url, api_key=result.rollout.api_key, max_retries=0)
    raises(Exception, lambda: late.models.list() and late.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}]))
    assert solve_async.run(client, "hello").trace().metrics["characters"] > 0
    # Called directly it is the plain function.
    assert sinew.rollout(lambda task: task.upper())("x") == "X"


def many(client):
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for i in range(6):
            file.write(json.dumps({"id": f"t{i}", "question": "What is 17 * 23?",
                                   "result": "391" if i % 2 == 0 else "1"}) + "\n\n")
        file.flush()
        data = Dataset.from_jsonl(file.name)
    assert len(data) == 6 and data[1].data == {"result": "1"}
    live, peak, lock = set(), 0, threading.Lock()

    @sinew.rollout
    def watched(task, base_url, api_key):
        nonlocal peak
        with lock:
            live.add(base_url)
            peak = max(peak, len(live))
        try:
            return solve(task, base_url, api_key) if task.id != "t5" else 1 / 0
        finally:
            with lock:
                live.discard(base_url)

    results = list(watched.run_all(client, data, concurrency=3, group_size=2))
    assert len(results) == 12 and 1 < peak <= 3, (len(results), peak)
    by_task = {}
    for r in results:
        by_task.setdefault(r.task.id, []).append(r)
    assert all(len(rs) == 2 for rs in by_task.values())
    assert [r.reward for r in by_task["t0"]] == [1.0, 1.0]
    assert [r.reward for r in by_task["t1"]] == [0.0, 0.0]
    groups = {r.trace().raw["group"] for r in by_task["t0"]}
    assert groups == {"t0"}
    for broken in by_task["t5"]:
        assert isinstance(broken.error, ZeroDivisionError) and not broken.ok
        assert broken.trace().end["type"] == "failed"


def bounds(client):
    never = threading.Event()

    @sinew.rollout
    def hangs(task, rollout):
        if task.prompt == "hang":
            never.wait()
        return 1

    # Whoever waits for the agent that hangs waits for ever.
    results = list(hangs.run_all(client, ["hang", "go"], concurrency=2, timeout_s=5.0))
    late = next(r for r in results if r.task.prompt == "hang")
    assert late.timed_out and late.trace().end == {"type": "truncated", "limit": "wall_time"}
    assert next(r for r in results if r.task.prompt == "go").ok
    # Who leaves early leaves no rollout open.
    for result in hangs.run_all(client, ["go", "hang"], concurrency=2):
        break
    assert result.ok


def wrong_input(client):
    stranger = Client(URL, "not-the-control-token")
    e = raises(ApiError, stranger.rollout, "POST", "/rollouts", "401")
    assert e.status == 401
    raises(sinew.SinewError, lambda: Client("127.0.0.1:1"), "http://HOST:PORT")
    raises(sinew.ConnectionFailed, Client("http://127.0.0.1:1", tries=2).health, "sinew serve")
    raises(ApiError, lambda: client.trace("nobody"), "404")
    raises(RolloutError, lambda: sinew.reward(1.0), "outside of a rollout")
    raises(RolloutError, lambda: sinew.rollout(lambda x: 1), "must be `task`")
    raises(DatasetError, lambda: Dataset(["a", {"prompt": 3}]), "task 1", "expected text")
    raises(DatasetError, lambda: Dataset([Task("a", ""), Task("a", "")]), "twice")
    raises(sinew.SinewError, lambda: client.rollout().reward(float("nan")), "finite")

    @sinew.rollout
    def silent(task):
        return None

    @sinew.rollout
    def text(task):
        return "good"

    @sinew.rollout
    def reports(task):
        return {"reward": 0.5, "success": True, "metrics": {"steps": 2}}

    @sinew.rollout
    def misreports(task):
        return {"reward": 0.5, "rewards": 1}

    reported = reports.run(client, "x")
    assert reported.ok and reported.reward == 0.5, reported
    assert reported.trace().success and reported.trace().metrics["steps"] == 2
    assert "rewards is int" in str(misreports.run(client, "x").error)
    assert isinstance(silent.run(client, "x").error, NoReward)
    assert "number" in str(text.run(client, "x").error)
    with raises_in_rollout(client) as rollout:
        pass
    assert rollout.trace().end["type"] == "failed"
    assert rollout.trace().reward is None


class raises_in_rollout:
    """A rollout whose block fails."""

    def __init__(self, client):
        self.rollout = client.rollout(task="t")

    def __enter__(self):
        raises(KeyError, self._fail)
        return self.rollout

    def _fail(self):
        with self.rollout:
            raise KeyError("x")

    def __exit__(self, *_):
        return None


with Client(URL, TOKEN) as client:
    assert client.health()
    one_rollout(client)
    many(client)
    bounds(client)
    wrong_input(client)
print("ok")
