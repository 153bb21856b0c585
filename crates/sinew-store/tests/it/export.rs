//! Exports: their content, and other programs that read them.

use crate::support::{id, trace};
use serde_json::json;
use sinew_store::{DiskStore, ExportFormat, Filter, StoreOptions, StoreReader, TraceStore, export};
use sinew_types::{Message, Role, ToolCall, ToolSpec};
use std::path::{Path, PathBuf};

/// Rows of the store: more than a page has.
const ROWS: u64 = 2100;

fn store(directory: &Path) -> StoreReader {
    let store = DiskStore::open(directory, StoreOptions::default()).unwrap();
    let traces: Vec<_> = (0..ROWS)
        .map(|n| {
            let mut trace = trace(n, 3);
            trace.task_kind = ["code", "math"][n as usize % 2].into();
            trace.outcome.unscored = n % 100 == 50;
            trace
        })
        .collect();
    store.commit_batch(&traces).unwrap();
    StoreReader::open(directory).unwrap()
}

fn lines(path: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect()
}

#[test]
fn rows_have_what_the_traces_have() {
    let directory = tempfile::tempdir().unwrap();
    let store = store(&directory.path().join("store"));
    let path = directory.path().join("a.jsonl");
    let format = ExportFormat::of(&path).unwrap();
    let filter = Filter {
        task_kind: Some("code".into()),
        ..Filter::default()
    };
    let count = export(&store, &filter, Some(30), &path, format, true).unwrap();
    let rows = lines(&path);
    assert_eq!((count.episodes, rows.len()), (30, 30));
    assert_eq!(rows[1]["episode"], "e2");
    assert_eq!(rows[1]["type"], "code");
    assert_eq!(
        rows[1]["mask"],
        serde_json::json!([false, false, false, true, true, true])
    );
    assert_eq!(
        rows[1]["versions"],
        serde_json::json!([null, null, null, 2, 2, 2])
    );
    assert_eq!(rows[1]["logprobs"][0], serde_json::Value::Null);
    assert_eq!(rows[1]["tokens"].as_array().unwrap().len(), 6);
    assert_eq!(
        rows[25]["reward"],
        serde_json::Value::Null,
        "no score is not 0"
    );
    assert_eq!(rows[25]["success"], serde_json::Value::Null);
    // This export has no tokens and several pages, in the order of commits; it replaces the earlier file.
    let count = export(&store, &Filter::default(), None, &path, format, false).unwrap();
    let rows = lines(&path);
    assert_eq!((count.episodes, rows.len() as u64), (ROWS, ROWS));
    assert!(
        rows.iter()
            .zip(0..)
            .all(|(row, n)| row["episode"] == id(n).as_str())
    );
    assert!(rows[0].get("tokens").is_none());
}

#[test]
fn a_row_is_the_whole_conversation_or_says_that_it_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let disk = DiskStore::open(&directory.path().join("store"), StoreOptions::default()).unwrap();
    let said = |turn: Message, tools: Vec<ToolSpec>, n| {
        let mut trace = trace(n, 3);
        trace.nodes[0].tools = tools;
        trace.nodes[1].messages = vec![turn];
        trace
    };
    let mut turn = Message::new(Role::Assistant, "<f>1</f>");
    turn.reasoning = Some("why".into());
    turn.tool_calls = vec![ToolCall {
        id: "c".into(),
        name: "f".into(),
        arguments: json!({"code": "1"}),
    }];
    let tool = ToolSpec {
        name: "f".into(),
        description: "d".into(),
        parameters: json!({"type": "object"}),
    };
    let mut mute = trace(3, 3);
    mute.nodes[1].messages.clear();
    let traces = [
        said(turn.clone(), vec![tool], 1),
        said(turn, Vec::new(), 2),
        mute,
    ];
    disk.commit_batch(&traces).unwrap();
    let reader = StoreReader::open(&directory.path().join("store")).unwrap();
    let path = directory.path().join("a.jsonl");
    let format = ExportFormat::JsonLines;
    let done = export(&reader, &Filter::default(), None, &path, format, false).unwrap();
    assert_eq!((done.episodes, done.without_messages), (3, 1));
    let rows = lines(&path);
    let last = &rows[0]["messages"][1];
    assert_eq!(last["role"], "assistant");
    assert_eq!(last["reasoning_content"], "why");
    let function = &last["tool_calls"][0]["function"];
    assert_eq!(function["arguments"], "{\"code\":\"1\"}");
    assert_eq!(rows[0]["tools"][0]["function"]["name"], "f");
    // A prompt without tools taught another notation: the call is a part of the text.
    let last = &rows[1]["messages"][1];
    assert_eq!(last["content"], "<f>1</f>");
    assert!(last.get("tool_calls").is_none(), "{last}");
    assert_eq!(rows[2]["messages"], serde_json::Value::Null);
}

#[test]
fn a_file_is_whole_or_not_there() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("store");
    let store = store(&folder);
    let path = directory.path().join("a.jsonl");
    std::fs::write(&path, "before\n").unwrap();
    std::fs::remove_dir_all(folder.join("segments")).unwrap();
    let format = ExportFormat::JsonLines;
    assert!(export(&store, &Filter::default(), None, &path, format, false).is_err());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "before\n");
    let left: Vec<_> = directory.path().read_dir().unwrap().flatten().collect();
    assert_eq!(left.len(), 2, "{left:?}");
    assert_eq!(ExportFormat::of(Path::new("a.csv")), None);
    assert_eq!(ExportFormat::of(Path::new("parquet")), None);
}

#[cfg(feature = "columns")]
#[test]
fn pyarrow_duckdb_and_datasets_read_the_same_rows() {
    let directory = tempfile::tempdir().unwrap();
    let store = store(&directory.path().join("store"));
    for ending in ["jsonl", "parquet", "arrow"] {
        let path = directory.path().join(format!("episodes.{ending}"));
        let format = ExportFormat::of(&path).unwrap();
        let count = export(&store, &Filter::default(), None, &path, format, true).unwrap();
        assert_eq!(count.episodes, ROWS);
    }
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let script = root.join("crates/sinew-store/tests/it/open_exports.py");
    let done = std::process::Command::new(root.join(".cache/venv-litellm/bin/python3"))
        .arg(script)
        .args([directory.path().to_str().unwrap(), &ROWS.to_string()])
        .env("HF_HOME", directory.path().join("hf"))
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{errors}");
    assert_eq!(
        String::from_utf8_lossy(&done.stdout).trim(),
        r#"{"unscored_code": 21}"#
    );
}
