//! Trackers of experiments: a run as MLflow's server and the packages of W&B and ClearML have it.

use crate::{Server, emit, run, start, step};
use sinew_pipeline::{Bus, Phase, RunEvent};
use std::path::Path;
use std::sync::Arc;

/// MLflow's own server, with files of its own in the folder that is named.
const MLFLOW: &str = "
import os, sys
folder = sys.argv[1]
os.environ.update({
    'MLFLOW_ALLOW_FILE_STORE': 'true', '_MLFLOW_SERVER_FILE_STORE': folder + '/runs', '_MLFLOW_SERVER_SERVE_ARTIFACTS': 'true',
    '_MLFLOW_SERVER_ARTIFACT_ROOT': 'mlflow-artifacts:/', '_MLFLOW_SERVER_ARTIFACT_DESTINATION': folder + '/files',
})
from werkzeug.serving import make_server
from mlflow.server import app
server = make_server('127.0.0.1', 0, app)
print(server.port, flush=True)
server.serve_forever()
";

/// A session with the steps, which may come to its end.
fn session(config: &str, folder: &Path, steps: std::ops::RangeInclusive<u64>, done: bool) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let bus = Bus::default();
    let signals = start(config, folder, &bus, &runtime);
    std::fs::write(folder.join("report.html"), "<p>report</p>").unwrap();
    for n in steps {
        let mut record = step(n, n as f64 / 4.0, 0.5);
        record.rollout.metrics = [("reward/a[b]".into(), 1.0)].into();
        emit(&bus, RunEvent::Step(Arc::new(record)));
    }
    if done {
        emit(&bus, RunEvent::Phase(Phase::Done));
    }
    drop(signals);
}

#[test]
fn mlflow_has_one_run_of_two_sessions_with_parameters_metrics_and_files() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(MLFLOW, &[dir.path().to_str().unwrap()]);
    let url = format!("http://127.0.0.1:{}", server.port);
    let config = format!(
        "[mlflow]\nurl = \"{url}/\"\nexperiment = \"agents & tools\"\ntags = {{ team = \"blue\" }}"
    );
    session(&config, dir.path(), 1..=2, false);
    // The session that goes on is of the same run.
    session(&config, dir.path(), 3..=3, true);
    let program = "
import sys
from mlflow.tracking import MlflowClient
c = MlflowClient(tracking_uri=sys.argv[1])
[e] = [e for e in c.search_experiments() if e.name != 'Default']
[r] = c.search_runs([e.experiment_id])
print(e.name, r.info.run_name, r.info.status, r.data.tags['team'], r.data.tags['mlflow.source.name'])
print(sorted((k, v) for k, v in r.data.params.items() if k != 'long'), len(r.data.params['long']))
h = c.get_metric_history(r.info.run_id, 'rollout/reward')
print([(m.step, m.value, m.timestamp > 1.6e12) for m in h], r.data.metrics['rollout/reward.a_b_'])
files = {f.path: open(c.download_artifacts(r.info.run_id, f.path)).read() for f in c.list_artifacts(r.info.run_id)}
print(sorted(files.items()), r.info.end_time >= r.info.start_time)
";
    assert_eq!(
        run(program, &[Path::new(&url)]),
        "agents & tools demo FINISHED blue sinew\n\
         [('env.0.type', 'shop'), ('train.steps', '3')] 6000\n\
         [(1, 0.25, True), (2, 0.5, True), (3, 0.75, True)] 1.0\n\
         [('recipe.toml', 'name = \"demo\"'), ('report.html', '<p>report</p>')] True\n"
    );
}

#[test]
fn the_package_of_weights_and_biases_reads_the_offline_run() {
    let dir = tempfile::tempdir().unwrap();
    let config = "[wandb]\nproject = \"agents\"\nentity = \"blue\"\ntags = [\"a\", \"b\"]";
    session(config, dir.path(), 1..=400, true);
    let program = "
import glob, json, os, sys
from wandb.proto import wandb_internal_pb2 as pb
from wandb.sdk.internal.datastore import DataStore
[folder] = glob.glob(sys.argv[1] + '/wandb/offline-run-*')
[path] = glob.glob(folder + '/run-*.wandb')
store = DataStore()
store.open_for_scan(path)
records = []
while (data := store.scan_data()) is not None:
    records.append(pb.Record.FromString(data))
print([r.num for r in records] == list(range(1, len(records) + 1)), store.get_offset() == os.stat(path).st_size)
kinds = [r.WhichOneof('record_type') for r in records]
print(kinds[:3], kinds[-2:])
r = records[1].run
print(r.run_id == path[:-6].split('-')[-1] == folder.split('-')[-1], r.entity, r.project, r.display_name, r.run_group, r.job_type, list(r.tags))
config = {i.key: json.loads(i.value_json) for i in r.config.update}
print(config['train'], config['env'], len(config['long']), r.start_time.seconds > 1.6e9)
rows = [(r.history.step.num, {i.key: json.loads(i.value_json) for i in r.history.item}) for r in records if r.HasField('history')]
print(len(rows), rows[0][0], rows[-1][0], [rows[-1][1][k] for k in ['_step', 'step', 'rollout/reward', 'rollout/reward/a[b]']])
print(all(n == row['_step'] and row['step'] == n + 1 and row['_runtime'] >= 0 for n, row in rows))
metrics = {r.metric.name: r.metric.step_metric for r in records if r.HasField('metric')}
print(set(rows[-1][1]) - set(metrics) == {'step', '_step', '_timestamp', '_runtime'}, set(metrics.values()))
summary = {i.key: json.loads(i.value_json) for r in records if r.HasField('summary') for i in r.summary.update}
print(summary['rollout/reward'], [f.path for f in records[-2].files.files], records[-1].exit.exit_code)
print(open(folder + '/files/report.html').read())
";
    assert_eq!(
        run(program, &[dir.path()]),
        "True True\n\
         ['header', 'run', 'metric'] ['files', 'exit']\n\
         True blue agents demo demo train ['a', 'b']\n\
         {'steps': 3} [{'type': 'shop'}] 70000 True\n\
         400 0 399 [399, 400, 100, 1]\n\
         True\n\
         True {'step'}\n\
         100 ['recipe.toml', 'report.html'] 0\n\
         <p>report</p>\n"
    );
}

/// A server with the methods of ClearML's API that an import calls; it records each call.
const CLEARML: &str = "
import base64, json, os, sys, tempfile, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
told, task = [], {}
def word(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip('=')
token = '.'.join(map(word, [{'alg': 'HS256', 'typ': 'JWT'}, {'exp': 9e9, 'api_version': '2.23'}, 'x']))
class Api(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get('content-length') or 0)).decode()
        name, lines = self.path.rsplit('/', 1)[-1], [json.loads(l) for l in body.splitlines() if l.strip()]
        told.append((name, lines))
        if name == 'tasks.create':
            task.update(lines[0], id='t1', status='created')
        if name == 'tasks.edit':
            task.update({k: v for k, v in lines[0].items() if k not in ('task', 'force')})
        data = {
            'auth.login': {'token': token}, 'tasks.create': {'id': 't1'}, 'tasks.edit': {'updated': 1, 'fields': {}},
            'tasks.get_by_id': {'task': task}, 'projects.get_all': {'projects': [{'id': 'p1', 'name': 'agents'}]},
        }.get(name, {})
        meta = {'result_code': 200, 'result_msg': 'OK', 'endpoint': {'name': name, 'requested_version': '2.23', 'actual_version': '2.23'}}
        answer = json.dumps({'meta': meta, 'data': data}).encode()
        self.send_response(200)
        self.send_header('content-length', str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    do_GET = do_POST
    def log_message(self, *_):
        pass
server = ThreadingHTTPServer(('127.0.0.1', 0), Api)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f'http://127.0.0.1:{server.server_port}'
os.environ.update(HOME=tempfile.mkdtemp(dir=sys.argv[1]), CLEARML_API_HOST=url, CLEARML_WEB_HOST=url, CLEARML_FILES_HOST=url, CLEARML_API_ACCESS_KEY='k', CLEARML_API_SECRET_KEY='s')
import glob
from clearml import Task
[session] = glob.glob(sys.argv[1] + '/clearml/offline-*')
print(Task.import_offline_session(session) == 't1')
[project] = [l[0]['name'] for n, l in told if n == 'projects.get_all']
print(project, task['name'], task['type'], task['tags'])
print(task['hyperparams']['train']['steps']['value'], task['hyperparams']['env']['0.type']['value'], json.loads(task['configuration']['recipe']['value'])['train'])
events = [e for n, l in told if n == 'events.add_batch' for e in l]
rewards = [(e['iter'], e['value']) for e in events if (e['metric'], e['variant']) == ('rollout', 'reward')]
print(rewards, {e['task'] for e in events}, {e['type'] for e in events}, all(e['timestamp'] > 1.6e12 for e in events))
print(told[-1][0], flush=True)
os._exit(0)
";

#[test]
fn the_package_of_clearml_imports_the_offline_session() {
    let dir = tempfile::tempdir().unwrap();
    let config = "[clearml]\nproject = \"agents\"\ntags = [\"a\"]";
    session(config, dir.path(), 1..=3, true);
    let read = run(CLEARML, &[dir.path()]);
    let read: Vec<&str> = read.lines().filter(|l| !l.starts_with("ClearML")).collect();
    assert_eq!(
        read,
        [
            "True",
            "^agents$ demo training ['a']",
            "3 shop {'steps': 3}",
            "[(1, 0.25), (2, 0.5), (3, 0.75)] {'t1'} {'training_stats_scalar'} True",
            "tasks.completed",
        ]
    );
}
