//! Tasks that a class gives itself.

use crate::support::{Sizes, workers};
use sinew_bridge::{PythonTasks, TargetKind};
use sinew_env::{Split, Taskset};
use std::collections::BTreeSet;

fn read(tasks: &str) -> Result<PythonTasks, String> {
    let source = format!("class E:\n    def step(self, text): return text\n{tasks}");
    let (workers, _dir) = workers(&source, (TargetKind::Env, "E"), Sizes::default()).unwrap();
    PythonTasks::read(&workers, 0, "user.py:E", 5).map_err(|e| e.to_string())
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
            "line 2: a row is a text or an object",
        ),
        ("    tasks = [{'prompt': 7}]", "line 1: prompt is 7"),
        ("    tasks = []", "no row for the split train"),
        (
            "    @staticmethod\n    def tasks(): return 1 / 0",
            "user.py:4: ZeroDivisionError",
        ),
        (
            "    @staticmethod\n    def tasks():\n        while True: yield 'x'",
            "more than 100000 rows",
        ),
    ] {
        let error = read(tasks).unwrap_err();
        assert!(error.contains(said), "{error}");
    }
}
