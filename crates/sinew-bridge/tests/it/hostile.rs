//! Code that crashes, hangs, lies or takes all it can.

use crate::support::{Sizes, call, calls, factory, open};
use serde_json::{Value, json};
use sinew_env::Env;
use sinew_types::FailureKind;
use std::sync::Arc;

const HOSTILE: &str = r#"
import os, socket, struct, subprocess, sys, time
from sinew import Env, tool

def sockets():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(socket.socket(fileno=os.dup(int(fd))))
        except OSError:
            pass
    return found

class E(Env):
    # Its author starts processes, no model does: episodes share workers.
    runs_code = False

    def start(self, task):
        self.count = 0

    @tool
    def count_up(self) -> int:
        self.count += 1
        return self.count

    @tool
    def die(self):
        os._exit(9)

    @tool
    def hang(self):
        while True:
            time.sleep(1)

    @tool
    def spin(self):
        while True:
            pass

    @tool
    def shout(self) -> str:
        for _ in range(1000):
            print("x" * 10000)
            sys.stderr.write("y" * 10000)
        os.write(1, b"z" * 1000000)
        subprocess.run(["/bin/sh", "-c", "head -c 1000000 /dev/zero"])
        return "quiet"

    @tool
    def forge(self) -> str:
        body = b'{"id": 999, "ok": {}}'
        frame = struct.pack(">I", len(body)) + body
        sys.stdout.write(frame.decode("latin-1"))
        os.write(1, frame)
        os.write(2, frame)
        # A child does not hold the connection.
        child = os.fork()
        if child == 0:
            for s in sockets():
                try:
                    s.sendall(frame)
                except OSError:
                    pass
            os._exit(0)
        os.waitpid(child, 0)
        # The host accepts one connection.
        try:
            socket.create_connection(("127.0.0.1", 4200), timeout=2).close()
            return "connected twice"
        except OSError:
            return "refused"

    @tool
    def break_in(self):
        for s in sockets():
            try:
                s.sendall(struct.pack(">I", 0xffffffff))
            except OSError:
                pass
        time.sleep(60)

    @tool
    def bomb(self):
        while True:
            os.fork()

    @tool
    def eat(self):
        kept = []
        while True:
            kept.append(b"x" * (1 << 24))

    @tool
    def flood(self) -> str:
        return "x" * (40 << 20)

    @tool
    def peek(self, path: str) -> str:
        try:
            return open(path).read()
        except OSError as e:
            return "no: " + type(e).__name__

    def reward(self):
        return self.count
"#;

/// Observation of one call, or the error.
async fn ask(env: &mut dyn Env, tool: &str, arguments: Value) -> Result<String, String> {
    match env.step(calls(vec![call("a", tool, arguments)])).await {
        Ok(step) => Ok(step.observation.unwrap().content.text().into_owned()),
        Err(e) => {
            assert_eq!(e.failure_kind(), FailureKind::Environment);
            Err(e.to_string())
        }
    }
}

/// One session ends its worker. The other session fails with a reason, and the next one works.
async fn ends_its_worker(tool: &str, timeout_s: f64, said: &str) {
    let (factory, _dir) = factory(HOSTILE, Sizes::within(timeout_s));
    let (mut guilty, mut other) = (open(&factory).await, open(&factory).await);
    assert_eq!(
        ask(other.as_mut(), "count_up", json!({})).await.unwrap(),
        "1"
    );
    let error = ask(guilty.as_mut(), tool, json!({})).await.unwrap_err();
    assert!(error.contains(said), "{tool}: {error}");
    let error = ask(other.as_mut(), "count_up", json!({}))
        .await
        .unwrap_err();
    assert!(error.contains("its Python worker ended"), "{tool}: {error}");
    assert!(guilty.close().await.is_err() && other.close().await.is_err());
    let mut next = open(&factory).await;
    assert_eq!(
        ask(next.as_mut(), "count_up", json!({})).await.unwrap(),
        "1",
        "{tool}"
    );
    next.close().await.unwrap();
}

#[tokio::test]
async fn a_crash_takes_the_sessions_of_its_worker() {
    ends_its_worker("die", 60.0, "exited 9").await;
}

#[tokio::test]
async fn a_hang_takes_the_sessions_of_its_worker() {
    ends_its_worker("hang", 3.0, "longer than 3 s").await;
    ends_its_worker("spin", 3.0, "longer than 3 s").await;
}

#[tokio::test]
async fn a_broken_frame_takes_the_sessions_of_its_worker() {
    ends_its_worker("break_in", 60.0, "broke the protocol").await;
}

#[tokio::test]
async fn a_call_that_takes_all_memory_takes_the_sessions_of_its_worker() {
    ends_its_worker("eat", 60.0, "out_of_memory").await;
}

#[tokio::test]
async fn a_fork_bomb_takes_the_sessions_of_its_worker() {
    ends_its_worker("bomb", 20.0, "").await;
}

#[tokio::test]
async fn other_errors_of_one_session_stay_there() {
    let (factory, _dir) = factory(HOSTILE, Sizes::default());
    let (mut guilty, mut other) = (open(&factory).await, open(&factory).await);
    ask(other.as_mut(), "count_up", json!({})).await.unwrap();
    let guilty_one = guilty.as_mut();
    assert_eq!(
        ask(guilty_one, "forge", json!({})).await.unwrap(),
        "refused"
    );
    assert_eq!(ask(guilty_one, "shout", json!({})).await.unwrap(), "quiet");
    // An observation has a limit, so the answer fits a frame.
    let cut = ask(guilty_one, "flood", json!({})).await.unwrap();
    assert!(
        cut.len() < 70_000 && cut.contains("more characters"),
        "{}",
        cut.len()
    );
    for path in ["/etc/shadow", "/root/.bashrc", "/proc/1/environ"] {
        let said = ask(guilty_one, "peek", json!({"path": path}))
            .await
            .unwrap();
        assert!(said.starts_with("no: "), "{path}: {said}");
    }
    assert_eq!(
        ask(other.as_mut(), "count_up", json!({})).await.unwrap(),
        "2"
    );
    guilty.close().await.unwrap();
    other.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_sessions_keep_their_own_state() {
    let sizes = Sizes {
        workers: 2,
        sessions: 500,
        ..Sizes::default()
    };
    let (factory, _dir) = factory(HOSTILE, sizes);
    let factory = Arc::new(factory);
    let mut all = Vec::new();
    for i in 0..1000usize {
        let factory = Arc::clone(&factory);
        all.push(tokio::spawn(async move {
            let mut env = open(&factory).await;
            for _ in 0..i % 3 {
                ask(env.as_mut(), "count_up", json!({})).await.unwrap();
            }
            (env, i)
        }));
    }
    for joined in all {
        let (mut env, i) = joined.await.unwrap();
        assert_eq!(env.score().await.unwrap().reward, (i % 3) as f64);
        env.close().await.unwrap();
    }
}

#[tokio::test]
async fn a_dropped_session_frees_its_place() {
    let sizes = Sizes {
        sessions: 1,
        ..Sizes::default()
    };
    let (factory, _dir) = factory(HOSTILE, sizes);
    drop(open(&factory).await);
    let mut second = open(&factory).await;
    second.close().await.unwrap();
}
