"""Reads a run back with the clients of trackers, and compares it with its files. Argument: the folder of the run.

Run by the tests of the `sinew` crate, with the interpreter that has the clients, in a folder that holds what they wrote.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sinew import track

Rows = dict[str, list[tuple[int, float]]]


def expected(run: Path) -> Rows:
    """Each number with its steps and values, as the files say."""
    out: Rows = {}

    def add(step: int, name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, below in value.items():
                add(step, f"{name}/{key}" if name else key, below)
        elif isinstance(value, (int, float)):
            out.setdefault(name, []).append((step, value))

    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["updates_applied"] > 0
        add(record["step"], "", record)
    for number, line in enumerate((run / "evals.jsonl").read_text().splitlines(), 1):
        record = json.loads(line)
        add(record["step"], "held_out", record["stats"] | {"number": number})
    assert len(out["rollout/reward"]) >= 3 and len(out["held_out/success"]) >= 2
    return out


def same(got: Rows, wanted: Rows, named: Any = str) -> None:
    assert sorted(got) == sorted(map(named, wanted)), set(got) ^ set(map(named, wanted))
    for name, rows in wanted.items():
        steps, values = zip(*got[named(name)])
        assert list(steps) == [step for step, _ in rows], (name, got[named(name)])
        # Some keep 32 bits.
        assert all(math.isclose(a, b, rel_tol=1e-6) for a, (_, b) in zip(values, rows)), (name, got[named(name)], rows)


def tensorboard(run: Path) -> Rows:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    tags = read.Tags()["tensors"]
    return {tag: [(e.step, e.tensor_proto.float_val[0]) for e in read.Tensors(tag)] for tag in tags}


def mlflow(run: Path, status: str = "FINISHED") -> Rows:
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    [experiment] = [e for e in client.search_experiments() if e.name == "sinew"]
    own = track.Run(run).id
    [found] = [r for r in client.search_runs([experiment.experiment_id]) if r.data.tags["sinew.run"] == own]
    assert found.info.run_name == "tiny" and found.info.status == status, found
    assert found.data.params["train.steps"] == "3" and found.data.tags["sinew.end"] == "ended"
    files = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert files == {"recipe.toml", "report.html"}
    history = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    return {name: sorted((m.step, m.value) for m in metrics) for name, metrics in history.items()}


def wandb(folder: Path, run_id: str) -> Rows:
    from wandb.proto import wandb_internal_pb2 as pb
    from wandb.sdk.internal.datastore import DataStore

    store, out, ends = DataStore(), {}, []
    store.open_for_scan(str(folder / f"run-{run_id}.wandb"))
    while (data := store.scan_data()) is not None:
        record = pb.Record.FromString(data)
        if record.HasField("run"):
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            assert (record.run.run_id, record.run.project, record.run.display_name) == (run_id, "sinew", "tiny")
            assert not config or config["train"]["steps"] == 3, config
        if record.HasField("history"):
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            kind = "held_out/" if "held_out/number" in row else ""
            for name, value in row.items():
                if not name.startswith("_") and (name != "step" or not kind):
                    out.setdefault(name, []).append((row["step"], value))
        if record.HasField("exit"):
            ends.append(record.exit.exit_code)
    assert ends == [0] and (folder / "files/report.html").exists()
    # The newest trained step is for sessions that resume the run.
    assert out.pop("trained_step") == out["step"], out
    return out


class Api(BaseHTTPRequestHandler):
    """The methods of ClearML's API that an import calls."""

    called: list[tuple[str, list[dict[str, Any]]]] = []
    task: dict[str, Any] = {}

    def do_POST(self) -> None:
        import base64

        body, name = self.rfile.read(int(self.headers.get("content-length") or 0)), self.path.rsplit("/", 1)[-1]
        # The others are files.
        is_json = "json" in (self.headers.get("content-type") or "")
        lines = [json.loads(line) for line in body.splitlines() if line.strip()] if is_json else []
        self.called.append((name, lines))
        if name in ("tasks.create", "tasks.edit"):
            self.task.update({k: v for k, v in lines[0].items() if k not in ("task", "force")})
            self.task.update(id="t1", status="created")
        words = ({"alg": "HS256", "typ": "JWT"}, {"exp": 9e9, "api_version": "2.23"}, "x")
        token = ".".join(base64.urlsafe_b64encode(json.dumps(w).encode()).decode().rstrip("=") for w in words)
        data = {
            "auth.login": {"token": token},
            "tasks.create": {"id": "t1"},
            "tasks.edit": {"updated": 1, "fields": {}},
            "tasks.get_by_id": {"task": self.task},
            "projects.get_all": {"projects": [{"id": "p1", "name": "sinew"}]},
        }.get(name, {})
        endpoint = {"name": name, "requested_version": "2.23", "actual_version": "2.23"}
        meta = {"result_code": 200, "result_msg": "OK", "endpoint": endpoint}
        answer = json.dumps({"meta": meta, "data": data}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass


def clearml(cache: Path) -> Rows:
    """What an import of the offline session gives a server. A name without `/` is the only series of its title."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    keys = {f"CLEARML_{kind}_HOST": url for kind in ("API", "WEB", "FILES")}
    os.environ.update(keys, CLEARML_API_ACCESS_KEY="k", CLEARML_API_SECRET_KEY="s")
    del os.environ["CLEARML_OFFLINE_MODE"]
    from clearml import Task

    [session] = [path for path in (cache / "offline").iterdir() if path.is_dir()]
    assert Task.import_offline_session(str(session)) == "t1"
    assert Api.task["name"] == "tiny" and Api.task["hyperparams"]["train"]["steps"]["value"] == "3"
    out: Rows = {}
    for event in (e for name, lines in Api.called if name == "events.add_batch" for e in lines):
        if event["type"] == "training_stats_scalar":
            title, series = event["metric"], event["variant"]
            name = title if title == series else f"{title}/{series}"
            out.setdefault(name, []).append((event["iter"], event["value"]))
    return {name: sorted(rows) for name, rows in out.items()}


def grown(run: Path, copy: Path) -> None:
    """A run that is sent in two parts is one run of its tracker, and sending it again adds nothing."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("tensorboard", "wandb", "track.json", "store"))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:2]) + '{"step": ')
    (copy / "evals.jsonl").rename(copy / "later")
    assert track.main([str(copy), "--to", "tensorboard"]) == track.main([str(copy), "--to", "mlflow"]) == 0
    # As a session that resumes a run replaces them.
    (copy / "new").write_text("".join(lines))
    (copy / "new").rename(copy / "metrics.jsonl")
    (copy / "later").rename(copy / "evals.jsonl")
    for name in ("tensorboard", "mlflow", "wandb") * 2:
        assert track.main([str(copy), "--to", name]) == 0, name
    same(tensorboard(copy), expected(run))
    same(mlflow(copy), expected(run), track.Mlflow.named)
    # Offline the client does not know what it has: each session is a whole run of the same id.
    sessions = sorted((copy / "wandb").glob("offline-run-*"))
    assert sessions
    for session in sessions:
        same(wandb(session, track.Run(copy).id), expected(run))


def nothing_measured_is_no_number() -> None:
    stats = {"episodes": 2, "failed": 1, "unscored": 1, "reward": 0.0, "success": 0.0, "by_env": {"a": {"reward": 0.5}}}
    record = {"step": 3, "updates_applied": 0, "loss": 0.0, "rollout": stats, "metrics": {"kl": None, "x": float("nan")}}
    wanted = {"step", "updates_applied", "rollout/episodes", "rollout/failed", "rollout/unscored", "rollout/by_env/a/reward"}
    assert track.numbers(record).keys() == wanted, track.numbers(record)


def refusals() -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert track.main(["nowhere", "--to", "tensorboard"]) == 2
        assert track.main(["nowhere", "--to", "tensorbord", "--check"]) == 2
    assert "nowhere holds no run: it has no recipe.toml" in said.getvalue(), said.getvalue()
    assert "there is no tracker 'tensorbord': allowed: clearml, mlflow" in said.getvalue(), said.getvalue()


def main() -> None:
    run = Path(sys.argv[1])
    wanted = expected(run)
    refusals()
    nothing_measured_is_no_number()
    same(tensorboard(run), wanted)
    same(mlflow(run), wanted, track.Mlflow.named)
    [session] = (run / "wandb").glob("offline-run-*")
    same(wandb(session, track.Run(run).id), wanted)
    grown(run, Path("copy"))
    same(clearml(Path(os.environ["CLEARML_CACHE_DIR"])), {name: sorted(rows) for name, rows in wanted.items()})
    # Threads of clients do not hold it up.
    sys.stdout.flush()
    os._exit(0)


main()
