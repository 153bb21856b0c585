//! Tasks that a class provides itself.

use crate::support::{Sizes, workers};
use sinew_bridge::{Python, PythonRows, RowLimits, SplitTasks, TargetKind};
use sinew_env::{EnvConfig, Split, Taskset};
use sinew_sandbox::SandboxSpec;
use std::collections::BTreeSet;
use std::time::Duration;

fn read(tasks: &str) -> Result<SplitTasks, String> {
    let source = format!("class E:\n    def step(self, text): return text\n{tasks}");
    let (workers, _dir) = workers(&source, (TargetKind::Env, "E"), Sizes::default()).unwrap();
    SplitTasks::of_class(&workers, 0, "user.py:E", 5).map_err(|e| e.to_string())
}

#[test]
fn a_function_gives_rows_for_each_split() {
    let tasks = read(
        "    @staticmethod\n    def tasks(split, seed):\n        \
         for i in range(3000 if split == 'train' else 20):\n            \
         yield {'prompt': '%s %d' % (split, i), 'answer': i, 'seed': seed}",
    )
    .unwrap();
    assert_eq!(
        (tasks.len(Split::Train), tasks.len(Split::HeldOut)),
        (3000, 20)
    );
    let task = tasks.get(Split::Train, 2999).unwrap();
    assert_eq!((task.prompt.as_str(), task.seed), ("train 2999", 5));
    assert_eq!(task.data["answer"], 2999);
    assert_eq!(task.id.to_string(), "train-2999");
}

#[test]
fn rows_without_splits_are_held_out_by_their_hash() {
    let tasks = read("    tasks = ['row %d' % i for i in range(1000)]").unwrap();
    let held = tasks.len(Split::HeldOut);
    assert!((20..100).contains(&held), "{held}");
    let mut prompts = BTreeSet::new();
    for split in [Split::Train, Split::HeldOut] {
        prompts.extend((0..tasks.len(split)).map(|i| tasks.get(split, i).unwrap().prompt));
    }
    assert_eq!(prompts.len(), 1000);
}

#[test]
fn bad_rows_and_missing_tasks_are_named() {
    for (tasks, said) in [
        ("", "add a static method tasks(split, seed)"),
        (
            "    tasks = ['a', 7]",
            "index 1: a row is a text or an object",
        ),
        ("    tasks = [{'prompt': 7}]", "index 0: prompt is 7"),
        ("    tasks = []", "no row for the split held-out"),
        (
            "    @staticmethod\n    def tasks(): return 1 / 0",
            "user.py:4: ZeroDivisionError",
        ),
    ] {
        let error = read(tasks).unwrap_err();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn tasks_are_read_within_the_limits_of_the_sandbox() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("big.py");
    let source = "class E:\n    def step(self, text): return text\n    @staticmethod\n    \
        def tasks(split):\n        return [str(len(bytearray(200 << 20)))]\n";
    std::fs::write(&file, source).unwrap();
    let keys = serde_json::json!({ "module": format!("{}:E", file.display()) });
    let config: Python = serde_json::from_value(keys).unwrap();
    let prompt = config.taskset(5).unwrap().get(Split::Train, 0).unwrap();
    assert_eq!(prompt.prompt, (200 << 20).to_string());
    let mut small = SandboxSpec::default();
    small.limits.memory_bytes = 128 << 20;
    let error = config.taskset_within(5, &small).err().unwrap().to_string();
    assert!(error.contains("memory"), "{error}");
}

/// Rows of a function `f`, within small limits.
fn made(source: &str) -> Result<PythonRows, String> {
    made_within(Duration::from_secs(60), source)
}

fn made_within(time: Duration, source: &str) -> Result<PythonRows, String> {
    let limits = RowLimits {
        rows: 25_000,
        bytes: 4 << 20,
        time,
    };
    let (workers, _dir) =
        workers(source, (TargetKind::Tasks, "f"), Sizes::default()).map_err(|e| e.to_string())?;
    PythonRows::of(&workers, "user.py:f", 5, limits).map_err(|e| e.to_string())
}

#[test]
fn a_function_of_its_own_gives_rows() {
    let all = made("def f():\n    for i in range(21000):\n        yield {'i': i, 'tags': {'a'}}")
        .unwrap();
    assert_eq!((all.train.len(), all.held_out), (21_000, None));
    assert_eq!(all.train[20_999]["i"], 20_999);
    assert_eq!(all.train[0]["tags"], serde_json::json!(["a"]));
    let both =
        made("async def f(split, seed=1, other=2):\n    return [split, {'seed': seed}]").unwrap();
    assert_eq!(both.train[0]["prompt"], "train");
    let held_out = both.held_out.unwrap();
    assert_eq!(held_out[0]["prompt"], "held-out");
    assert_eq!(held_out[1]["seed"], 5);
    let listed = made("class C:\n    rows = ['a']\nf = C.rows").unwrap();
    assert_eq!(listed.train.len(), 1);
}

#[test]
fn bad_rows_of_a_function_are_named_by_their_index_and_limits_hold() {
    for (source, said) in [
        (
            "def f(): return ['a', 7]",
            "index 1: a row is a text or a dict of columns, not 7",
        ),
        (
            "def f(): return [{'a': 1}, {'a': float('nan')}]",
            "user.py:1: index 1: the row is no JSON",
        ),
        (
            "def f(): return 'text'",
            "user.py:1: it gives str: expected rows",
        ),
        ("def f(): return 1 / 0", "user.py:1: ZeroDivisionError"),
        (
            "def f(level): return []",
            "no value for the parameter level",
        ),
        (
            "class f: pass",
            "is a class: name a function or a list of rows",
        ),
        ("def g(): pass", "has no f; it defines: g"),
        (
            "def f():\n    while True: yield 'x'",
            "more than 25000 rows",
        ),
        (
            "def f():\n    while True: yield 'x' * 9000",
            "more than 4194304 bytes of rows",
        ),
    ] {
        let error = made(source).unwrap_err();
        assert!(error.contains(said), "{error}");
    }
    let slow = "import time\ndef f():\n    while True:\n        time.sleep(0.2)\n        yield 'x'";
    let error = made_within(Duration::from_secs(2), slow).unwrap_err();
    assert!(error.contains("rows for more than 2 s"), "{error}");
}
