//! Code of a model that a worker starts: it ends with its call, its worker with its episode, and it reads
//! nothing of its worker.

use crate::support::{Sizes, call, calls, factory, open, reward, sample};
use serde_json::{Value, json};
use sinew_bridge::PythonReward;
use sinew_env::{Env, Reward};

/// Leaves a process behind that is not a child of anybody, and a file. It continues until it is killed.
const DAEMON: &str = r#"
import os, time
open("/tmp/left", "w").close()
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    if os.fork() == 0:
        while True:
            time.sleep(0.01)
    os._exit(0)
os.wait()
print("ran")
"#;

/// Like [`DAEMON`], but always a new process.
const HOPS: &str = r#"
import os
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    while True:
        if os.fork():
            os._exit(0)
print("ran")
"#;

/// Like [`DAEMON`], but hides from others of its user.
const HIDES: &str = r#"
import ctypes, os, time
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
        while True:
            time.sleep(0.01)
    os._exit(0)
os.wait()
print("ran")
"#;

/// Says what it could read of its parent.
const PEEKS: &str = r#"
import os
found, parent = [], os.getppid()
for name in ("mem", "environ", "maps", "fd/1", "exe", "cwd"):
    try:
        path = "/proc/%d/%s" % (parent, name)
        os.close(os.open(path, os.O_RDONLY))
        found.append(name)
    except OSError:
        pass
try:
    os.listdir("/proc/%d/fd" % parent)
    found.append("fd")
except OSError:
    pass
print("read", found)
"#;

/// Tools that run code, and list the remains.
const TOOLS: &str = r#"
import ctypes, os, sys
from sinew import Env, tool

def others(own=()):
    "Processes here but this one, the first and `own`; of threads none."
    kill = ctypes.CDLL(None).tgkill
    numbers = range(2, int(open("/proc/loadavg").read().split()[-1]) + 1)
    return [n for n in numbers if n not in own and n != os.getpid() and kill(n, n, 0) == 0]

class E(Env):
    def start(self, task):
        self.shell = None

    @tool
    def run(self, code: str) -> str:
        done = start([sys.executable, "-c", code], capture_output=True, text=True)
        return done.stdout + done.stderr

    @tool
    def keep(self) -> int:
        self.shell = keep(["/bin/cat"])
        return self.shell.pid

    @tool
    def left(self):
        own = [self.shell.pid] if self.shell else []
        alive = self.shell is not None and self.shell.poll() is None
        return [len(others(own)), sorted(os.listdir("/tmp")), alive]

    def reward(self):
        return 0.0
"#;

fn tools(start: &str) -> String {
    format!("{start}{TOOLS}")
}

/// A module whose source shows that it starts processes.
const OPEN: &str = "import subprocess\nstart, keep = subprocess.run, lambda a: subprocess.Popen(a, stdin=subprocess.PIPE)\n";
/// A module that starts processes and whose source does not show it.
const HIDDEN: &str = "sub = __import__('sub' + 'process')\nstart = sub.run\nkeep = lambda a: sub.Popen(a, stdin=sub.PIPE)\n";

async fn ask(env: &mut dyn Env, tool: &str, arguments: Value) -> Result<String, String> {
    match env.step(calls(vec![call("a", tool, arguments)])).await {
        Ok(step) => Ok(step.observation.unwrap().content.text().into_owned()),
        Err(e) => Err(e.to_string()),
    }
}

async fn run(env: &mut dyn Env, code: &str) -> Result<String, String> {
    ask(env, "run", json!({ "code": code })).await
}

#[tokio::test]
async fn code_ends_with_its_call_and_its_worker_with_the_episode() {
    let (factory, _dir) = factory(&tools(OPEN), Sizes::default());
    let mut first = open(&factory).await;
    for code in [DAEMON, HIDES, HOPS] {
        assert_eq!(run(first.as_mut(), code).await.unwrap(), "ran\n");
        let left = ask(first.as_mut(), "left", json!({})).await.unwrap();
        assert_eq!(left, "[0, [\"left\"], false]");
    }
    // Processes of the class itself keep running.
    ask(first.as_mut(), "keep", json!({})).await.unwrap();
    for code in [DAEMON, HIDES, HOPS] {
        assert_eq!(run(first.as_mut(), code).await.unwrap(), "ran\n");
        let left = ask(first.as_mut(), "left", json!({})).await.unwrap();
        assert!(left.starts_with("[0, [\"left\"],"), "{left}");
    }
    first.close().await.unwrap();
    let mut second = open(&factory).await;
    let left = ask(second.as_mut(), "left", json!({})).await.unwrap();
    assert_eq!(left, "[0, [], false]");
    second.close().await.unwrap();
}

#[tokio::test]
async fn a_held_process_outlives_calls_and_a_daemon_does_not() {
    let (factory, _dir) = factory(&tools(OPEN), Sizes::default());
    let mut env = open(&factory).await;
    ask(env.as_mut(), "keep", json!({})).await.unwrap();
    for code in [DAEMON, HIDES] {
        run(env.as_mut(), code).await.unwrap();
        let left = ask(env.as_mut(), "left", json!({})).await.unwrap();
        assert_eq!(left, "[0, [\"left\"], true]");
    }
    env.close().await.unwrap();
}

#[tokio::test]
async fn the_memory_of_a_worker_is_closed_to_its_children() {
    let (factory, _dir) = factory(&tools(OPEN), Sizes::default());
    let mut env = open(&factory).await;
    assert_eq!(run(env.as_mut(), PEEKS).await.unwrap(), "read []\n");
    env.close().await.unwrap();
}

#[tokio::test]
async fn code_does_not_start_where_episodes_share_a_worker() {
    let (shared, _dir) = factory(&tools(HIDDEN), Sizes::default());
    let mut env = open(&shared).await;
    let error = run(env.as_mut(), DAEMON).await.unwrap_err();
    assert!(
        error.contains("user.py") && error.contains("runs_code"),
        "{error}"
    );
    assert_eq!(
        ask(env.as_mut(), "left", json!({})).await.unwrap(),
        "[0, [], false]"
    );
    env.close().await.unwrap();
    // An episode with a separate worker may, and the worker is not used again.
    let sizes = Sizes {
        sessions: 1,
        ..Sizes::default()
    };
    let (own, _dir) = factory(&tools(HIDDEN), sizes);
    for _ in 0..2 {
        let mut env = open(&own).await;
        let left = ask(env.as_mut(), "left", json!({})).await.unwrap();
        assert_eq!(left, "[0, [], false]");
        assert_eq!(run(env.as_mut(), DAEMON).await.unwrap(), "ran\n");
        env.close().await.unwrap();
    }
}

#[tokio::test]
async fn a_text_that_runs_in_the_worker_spends_it() {
    let source = r#"
from sinew import Env, tool
seen = []
class E(Env):
    @tool
    def run(self, code: str) -> str:
        exec(code)
        return str(len(seen))
    def reward(self):
        return 0.0
"#;
    let (factory, _dir) = factory(source, Sizes::default());
    for _ in 0..2 {
        let mut env = open(&factory).await;
        for count in ["1", "2"] {
            assert_eq!(run(env.as_mut(), "seen.append(1)").await.unwrap(), count);
        }
        env.close().await.unwrap();
    }
}

/// Runs the output. The score is what was there before: processes and files.
const SCORES: &str = r#"
import os, subprocess, sys

def found():
    try:
        os.kill(-1, 0)
        return 1 + len(os.listdir("/tmp"))
    except ProcessLookupError:
        return len(os.listdir("/tmp"))

def f(output):
    before = found()
    done = subprocess.run([sys.executable, "-c", output], capture_output=True, text=True)
    return {"reward": float(before), "ran": "ran" in done.stdout, "read": "read []" in done.stdout}
"#;

async fn score(function: &PythonReward, output: &str) -> sinew_env::Score {
    function
        .score(&sample(output, json!({})))
        .await
        .unwrap_or_else(|u| panic!("{}", u.reason))
}

#[tokio::test]
async fn what_a_scored_answer_leaves_does_not_reach_the_next_score() {
    let coroutine = SCORES.replace("def f(", "async def f(");
    for source in [SCORES, &coroutine] {
        let (function, _dir) = reward(source, Sizes::default());
        for code in [DAEMON, HIDES, HOPS, DAEMON] {
            let score = score(&function, code).await;
            assert_eq!((score.value, score.parts["ran"]), (0.0, 1.0));
        }
        assert_eq!(score(&function, PEEKS).await.parts["read"], 1.0);
    }
}

#[tokio::test]
async fn all_scores_that_wait_for_a_worker_without_leftovers_come() {
    let source = "import subprocess\ndef f(output):\n    subprocess.run(['/bin/true'])\n    return len(output)";
    // More than a call may lose workers that end by a fault.
    let waiting = 20;
    let (function, _dir) = reward(source, Sizes::default());
    let texts: Vec<String> = (0..waiting).map(|n| "x".repeat(n)).collect();
    let scores = texts.iter().map(|text| score(&function, text));
    let scores = futures::future::join_all(scores).await;
    let values: Vec<f64> = scores.iter().map(|score| score.value).collect();
    assert_eq!(values, (0..waiting).map(|n| n as f64).collect::<Vec<_>>());
}

#[tokio::test]
async fn coroutines_that_share_a_worker_start_nothing() {
    let source = "sub = __import__('sub' + 'process')\nasync def f(output):\n    sub.run(['/bin/true'])\n    return 1";
    let (function, _dir) = reward(source, Sizes::default());
    let why = function.score(&sample("", json!({}))).await.unwrap_err();
    assert!(why.reason.contains("runs_code"), "{}", why.reason);
    let own = format!("{source}\nf.runs_code = True");
    let (function, _dir) = reward(&own, Sizes::default());
    assert_eq!(score(&function, "").await.value, 1.0);
}

/// Says what a sandbox of [`sinew.run_code`] shows, and leaves a process behind.
const LOOKS: &str = r#"
import os, sys
alone = []
for n in range(2, 100):
    if n != os.getpid():
        try:
            os.kill(n, 0)
            alone.append(n)
        except OSError:
            pass
print([alone, sorted(os.listdir(".")), sorted(os.listdir("/tmp")), os.path.exists("/code"), sys.stdin.read()])
open("/tmp/left", "w").close()
if os.fork() == 0:
    os.setsid()
    while True:
        pass
"#;

#[tokio::test]
async fn code_in_a_sandbox_of_its_own_sees_nothing_of_the_worker() {
    let source = r#"
from sinew import Env, run_code, tool
class E(Env):
    @tool
    def run(self, code: str) -> str:
        ran = run_code(code, {"a.txt": "x"}, "typed", 60.0)
        late = run_code("while True: pass", timeout_s=0.3)
        return "%s %s %s" % (ran.exit, ran.stdout.strip(), late.ending)
    def reward(self):
        return 0.0
"#;
    let (shared, _dir) = factory(source, Sizes::default());
    let mut both = [open(&shared).await, open(&shared).await];
    for _ in 0..2 {
        for env in &mut both {
            let said = run(env.as_mut(), LOOKS).await.unwrap();
            assert_eq!(said, "0 [[], ['a.txt'], [], False, 'typed'] timeout");
        }
    }
    for env in both {
        let mut env = env;
        env.close().await.unwrap();
    }
    for head in ["def", "async def"] {
        let source = format!(
            "from sinew import run_code\n{head} f(output):\n    return run_code(output).stdout == '3\\n'"
        );
        let (function, _dir) = reward(&source, Sizes::default());
        assert_eq!(score(&function, "print(3)").await.value, 1.0);
        assert_eq!(score(&function, "print(4)").await.value, 0.0);
    }
}

/// Sixteen calls that wait for code at once do not keep the answers from being read.
#[tokio::test]
async fn calls_that_wait_for_code_do_not_stop_the_worker() {
    let source = r#"
from sinew import Env, run_code, tool
class E(Env):
    @tool
    def run(self, code: str) -> str:
        return run_code(code, timeout_s=60.0).stdout
    def reward(self):
        return 0.0
"#;
    let (shared, _dir) = factory(source, Sizes::default());
    let calls = (0..20).map(|_| async {
        let mut env = open(&shared).await;
        let said = run(env.as_mut(), "print(1)").await.unwrap();
        env.close().await.unwrap();
        said
    });
    let said = futures::future::join_all(calls).await;
    assert!(said.iter().all(|s| s == "1\n"), "{said:?}");
}
