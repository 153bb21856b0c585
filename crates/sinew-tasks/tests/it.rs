//! Tasks of files: formats, errors with their lines, templates, splits.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use proptest::prelude::*;
use sinew_env::{Split, Taskset};
use sinew_tasks::{Example, Source, Splits, TableConfig, TableTaskset};
use std::fs;
use std::path::{Path, PathBuf};

fn config(source: &Path) -> TableConfig {
    TableConfig {
        name: "own".into(),
        source: source.into(),
        held_out: Splits::Share(0.25),
        prompt: Some("{{ question }}".into()),
        filter: None,
        system: None,
        examples: Vec::new(),
        kind: None,
    }
}

fn file(dir: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
    let path = dir.path().join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, text).unwrap();
    path
}

/// Rows 0..n as JSON lines.
fn lines(n: usize) -> String {
    (0..n)
        .map(|i| {
            format!(
                "{{\"question\": \"What is {i} + {i}?\", \"answer\": {}}}\n",
                2 * i
            )
        })
        .collect()
}

fn prompts(table: &TableTaskset, split: Split) -> Vec<String> {
    let tasks = (0..table.len(split)).map(|i| table.get(split, i).unwrap());
    tasks.map(|t| t.prompt).collect()
}

#[test]
fn rows_become_tasks_in_all_formats() {
    let dir = tempfile::tempdir().unwrap();
    let array: Vec<serde_json::Value> = lines(8)
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let csv: String = (0..8)
        .map(|i| format!("What is {i} + {i}?,{}\n", 2 * i))
        .collect();
    let sources = [
        file(&dir, "a.jsonl", &lines(8)),
        file(&dir, "a.json", &serde_json::to_string(&array).unwrap()),
        file(&dir, "a.csv", &format!("question,answer\n{csv}")),
        file(
            &dir,
            "a.tsv",
            &format!("question\tanswer\n{}", csv.replace(',', "\t")),
        ),
    ];
    let mut seen = Vec::new();
    for source in &sources {
        let table = TableTaskset::open(config(source)).unwrap();
        assert_eq!(table.len(Split::Train) + table.len(Split::HeldOut), 8);
        let task = table.get(Split::Train, 0).unwrap();
        assert!(task.data.get("answer").is_some());
        assert_eq!(task.kind, "own");
        seen.push((
            prompts(&table, Split::Train),
            prompts(&table, Split::HeldOut),
        ));
    }
    assert!(
        seen.windows(2).all(|w| w[0] == w[1]),
        "one split for all formats"
    );
}

#[test]
fn a_folder_has_its_splits_or_is_another_kind_of_task() {
    let dir = tempfile::tempdir().unwrap();
    file(&dir, "hub/data/train-00000.jsonl", &lines(3));
    file(
        &dir,
        "hub/data/test-00000.jsonl",
        "{\"question\": \"What is 1 + 1?\"}\n",
    );
    let mut settings = config(&dir.path().join("hub"));
    settings.held_out = Splits::Given;
    let table = TableTaskset::open(settings).unwrap();
    assert_eq!(prompts(&table, Split::HeldOut), ["What is 1 + 1?"]);
    assert_eq!(
        prompts(&table, Split::Train).len(),
        2,
        "the held-out one is left out"
    );
    assert_eq!(table.summary().overlapping, 1);

    file(&dir, "own/one/task.toml", "[metadata]\n");
    let error = TableTaskset::open(config(&dir.path().join("own")));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("type = \"harbor\""), "{error}");
}

#[test]
fn prompts_without_an_end_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "a.jsonl", "{\"question\": \"x\"}\n");
    let long = "{% for i in range(1000) %}{{ question * 100000 }}{% endfor %}";
    for (prompt, said) in [
        (long, "larger than"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "fuel",
        ),
    ] {
        let mut settings = config(&path);
        settings.prompt = Some(prompt.into());
        let error = TableTaskset::open(settings).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn a_bad_row_is_named_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        (
            "a.jsonl",
            "{\"question\": \"x\"}\n\n{\"question\": 1\n",
            "line 3: not a JSON object",
        ),
        (
            "b.jsonl",
            "{\"question\": \"x\"}\n[1]\n",
            "line 2: not a JSON object",
        ),
        (
            "c.jsonl",
            "{\"question\": \"x\"}\n{\"answer\": 1}\n",
            "line 2: tasks.prompt",
        ),
        (
            "d.jsonl",
            "{\"question\": \"x\"}\n{\"question\": \" \"}\n",
            "line 2: the prompt is empty",
        ),
        ("e.csv", "question,answer\nx,1\ny\n", "line 3"),
        ("f.csv", "question,question\nx,1\n", "named twice"),
        ("g.json", "{\"question\": 1}", "not a JSON array"),
        ("h.txt", "x", "format of this file is unknown"),
    ];
    for (name, text, expected) in cases {
        let error = TableTaskset::open(config(&file(&dir, name, text))).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(expected), "{name}: {error}");
        assert!(error.contains(name), "{error}");
    }
    let error = TableTaskset::open(config(&dir.path().join("none.jsonl"))).unwrap_err();
    assert!(error.to_string().contains("none.jsonl"), "{error}");
}

#[test]
fn missing_columns_are_explained_with_those_that_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let source = file(&dir, "a.jsonl", &lines(4));
    let mut settings = config(&source);
    settings.prompt = Some("{{ text }}".into());
    let error = TableTaskset::open(settings.clone())
        .unwrap_err()
        .to_string();
    assert!(error.contains("columns: `question`, `answer`"), "{error}");
    settings.prompt = None;
    let error = TableTaskset::open(settings.clone())
        .unwrap_err()
        .to_string();
    assert!(error.contains("\"{{ question }}\""), "{error}");
    settings.prompt = Some("{{ question".into());
    let error = TableTaskset::open(settings.clone())
        .unwrap_err()
        .to_string();
    assert!(error.contains("tasks.prompt"), "{error}");
    settings.prompt = Some("{% for i in range(100000000) %}x{% endfor %}".into());
    let error = TableTaskset::open(settings).unwrap_err().to_string();
    assert!(error.contains("line 1"), "{error}");
}

#[test]
fn filters_system_prompt_examples_and_messages_reach_the_task() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = config(&file(&dir, "a.jsonl", &lines(8)));
    settings.filter = Some("answer >= 8".into());
    settings.system = Some("Be brief.".into());
    settings.examples = vec![Example {
        user: "What is 1 + 0?".into(),
        assistant: "1".into(),
    }];
    let table = TableTaskset::open(settings).unwrap();
    assert_eq!(table.summary().filtered, 4);
    let task = table.get(Split::Train, 0).unwrap();
    let texts: Vec<String> = task
        .preamble
        .iter()
        .map(|m| m.content.text().into_owned())
        .collect();
    assert_eq!(texts, ["Be brief.", "What is 1 + 0?", "1"]);

    let dialogue = r#"{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q1"}]}
{"prompt": [{"role": "user", "content": "q2"}]}
"#;
    let mut settings = config(&file(&dir, "b.jsonl", dialogue));
    settings.prompt = None;
    let table = TableTaskset::open(settings.clone()).unwrap();
    let mut all = prompts(&table, Split::Train);
    all.extend(prompts(&table, Split::HeldOut));
    all.sort();
    assert_eq!(all, ["q1", "q2"]);
    settings.source = file(&dir, "d.jsonl", &dialogue.replace("user", "assistant")).into();
    let error = TableTaskset::open(settings.clone())
        .unwrap_err()
        .to_string();
    assert!(error.contains("line 1: the last message"), "{error}");
    let wrong = dialogue.replace("user", "robot");
    settings.source = file(&dir, "c.jsonl", &wrong).into();
    let error = TableTaskset::open(settings).unwrap_err().to_string();
    assert!(
        error.contains("line 1: prompt[1].role is \"robot\""),
        "{error}"
    );
}

#[test]
fn prompts_have_all_that_the_chat_protocol_has() {
    let dir = tempfile::tempdir().unwrap();
    let rows = r#"{"big": 18446744073709551617, "prompt": [{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}], "mood": 1}, {"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "c", "content": "4"}, {"role": "user", "content": "last"}]}
{"prompt": "other"}
"#;
    let mut settings = config(&file(&dir, "a.jsonl", rows));
    settings.prompt = None;
    let table = TableTaskset::open(settings.clone()).unwrap();
    assert_eq!(table.summary().notes, ["prompt[].mood (1) is not read"]);
    let tasks = [Split::Train, Split::HeldOut].map(|split| table.get(split, 0).unwrap());
    let task = tasks.iter().find(|t| t.prompt == "last").unwrap();
    let turn = &task.preamble[2];
    assert_eq!(turn.reasoning.as_deref(), Some("r"));
    assert_eq!(turn.tool_calls[0].name, "f");
    assert_eq!(task.preamble[3].tool_call_id.as_deref(), Some("c"));
    assert_eq!(task.data["big"], "18446744073709551617");
    let array = format!("[{}]", rows.trim().replace('\n', ","));
    settings.source = file(&dir, "a.json", &array).into();
    let same = TableTaskset::open(settings.clone()).unwrap();
    let tasks = [Split::Train, Split::HeldOut].map(|split| same.get(split, 0).unwrap());
    assert!(tasks.contains(task), "{tasks:?}");
    let picture = r#"[{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]"#;
    let wrong = rows.replace("\"last\"", picture);
    settings.source = file(&dir, "b.jsonl", &wrong).into();
    let error = TableTaskset::open(settings).unwrap_err().to_string();
    assert!(
        error.contains("line 1") && error.contains("an image"),
        "{error}"
    );
}

#[test]
fn a_split_without_rows_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = file(&dir, "a.jsonl", &lines(4));
    let mut settings = config(&source);
    settings.filter = Some("answer > 100".into());
    let error = TableTaskset::open(settings.clone())
        .unwrap_err()
        .to_string();
    assert!(error.contains("left out 4 rows"), "{error}");
    settings.filter = None;
    settings.held_out = Splits::Share(1.5);
    let error = TableTaskset::open(settings.clone())
        .unwrap_err()
        .to_string();
    assert!(error.contains("tasks.held_out = 1.5"), "{error}");
    // All rows may be held out, in their order, to be measured only.
    settings.held_out = Splits::Share(1.0);
    let table = TableTaskset::open(settings.clone()).unwrap();
    assert_eq!((table.len(Split::Train), table.len(Split::HeldOut)), (0, 4));
    settings.filter = Some("answer > 100".into());
    let error = TableTaskset::open(settings.clone())
        .unwrap_err()
        .to_string();
    assert!(error.contains("no rows to hold out"), "{error}");
    settings.filter = None;
    settings.held_out = Splits::Own(source.into());
    let error = TableTaskset::open(settings).unwrap_err().to_string();
    assert!(error.contains("no rows to train on"), "{error}");
}

#[cfg(feature = "parquet")]
#[test]
fn parquet_rows_are_read() {
    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    use parquet::file::writer::SerializedFileWriter;
    use std::sync::Arc;
    let schema = "message rows { required binary question (UTF8); required int64 answer; }";
    let schema = Arc::new(parquet::schema::parser::parse_message_type(schema).unwrap());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    let out = fs::File::create(&path).unwrap();
    let mut writer = SerializedFileWriter::new(out, schema, Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let questions: Vec<ByteArray> = ["a?", "b?", "c?"].map(ByteArray::from).into();
    column
        .typed::<ByteArrayType>()
        .write_batch(&questions, None, None)
        .unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column
        .typed::<Int64Type>()
        .write_batch(&[1, 2, 3], None, None)
        .unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    let table = TableTaskset::open(config(&path)).unwrap();
    assert_eq!(table.len(Split::Train) + table.len(Split::HeldOut), 3);
    assert!(table.get(Split::Train, 0).unwrap().data["answer"].is_i64());

    fs::write(&path, b"PAR1 no file").unwrap();
    let error = TableTaskset::open(config(&path)).unwrap_err().to_string();
    assert!(error.contains("a.parquet"), "{error}");
}

proptest! {
    #[test]
    fn splits_are_disjoint_whole_and_stable(n in 2usize..60, share in 0.01f64..0.9, extra in 0usize..20) {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = config(&file(&dir, "a.jsonl", &lines(n)));
        settings.held_out = Splits::Share(share);
        let Ok(table) = TableTaskset::open(settings.clone()) else {
            // A large share of few rows leaves none to train on: refused.
            return Ok(());
        };
        let (train, held_out) = (prompts(&table, Split::Train), prompts(&table, Split::HeldOut));
        prop_assert_eq!(train.len() + held_out.len(), n);
        prop_assert!(held_out.iter().all(|p| !train.contains(p)));
        // Rows that are added later do not move the others. The one that stands in for an empty split may.
        settings.source = file(&dir, "b.jsonl", &lines(n + extra)).into();
        if let Ok(more) = TableTaskset::open(settings) {
            let more = prompts(&more, Split::HeldOut);
            let moved = held_out.iter().filter(|p| !more.contains(p)).count();
            prop_assert!(moved <= usize::from(held_out.len() == 1));
        }
    }
}

#[test]
fn rows_that_code_made_are_named_by_their_index() {
    let row = |i: usize| serde_json::json!({"question": format!("What is {i}?"), "answer": i});
    let made = |rows: Vec<serde_json::Value>| Source::Made {
        by: "gen.py:rows".into(),
        rows: rows
            .into_iter()
            .map(|r| r.as_object().unwrap().clone())
            .collect(),
    };
    let mut settings = config(Path::new("unused"));
    settings.source = made((0..8).map(row).collect());
    settings.held_out = Splits::Own(made((100..103).map(row).collect()));
    let table = TableTaskset::open(settings.clone()).unwrap();
    assert_eq!((table.len(Split::Train), table.len(Split::HeldOut)), (8, 3));
    assert_eq!(prompts(&table, Split::HeldOut)[0], "What is 100?");
    let mut rows: Vec<_> = (0..8).map(row).collect();
    rows[3] = serde_json::json!({"answer": 3});
    settings.source = made(rows);
    let error = TableTaskset::open(settings).unwrap_err().to_string();
    assert!(error.contains("gen.py:rows, index 3:"), "{error}");
}

#[test]
fn splits_of_a_source_are_kept_and_a_share_beside_them_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let train = file(&dir, "hub/train-0.jsonl", &lines(4));
    let test = file(&dir, "hub/test-0.jsonl", "{\"question\": \"Why?\"}\n");
    file(&dir, "hub/extra.jsonl", &lines(9));
    let split = Source::Split {
        name: "hf:org/tiny".into(),
        train: vec![train],
        held_out: vec![test],
    };
    let folder = Source::Files(dir.path().join("hub"));
    for (source, notes) in [(folder, 1), (split.clone(), 0)] {
        let mut settings = config(Path::new("x"));
        settings.source = source;
        let error = TableTaskset::open(settings.clone())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("tasks.held_out = 0.25: has no effect"),
            "{error}"
        );
        assert!(error.contains("test-0.jsonl"), "{error}");
        settings.held_out = Splits::Given;
        let table = TableTaskset::open(settings).unwrap();
        assert_eq!(prompts(&table, Split::HeldOut), ["Why?"]);
        assert_eq!(
            (table.len(Split::Train), table.summary().notes.len()),
            (4, notes)
        );
    }
    // A source with splits gives its held-out rows as the held-out split of other rows. A source without
    // splits holds out 5 %.
    let mut settings = config(&file(&dir, "own.jsonl", &lines(3)));
    settings.held_out = Splits::Own(split);
    let table = TableTaskset::open(settings).unwrap();
    assert_eq!(prompts(&table, Split::HeldOut), ["Why?"]);
    let mut settings = config(&file(&dir, "many.jsonl", &lines(400)));
    settings.held_out = Splits::Given;
    let table = TableTaskset::open(settings).unwrap();
    assert!(
        (8..40).contains(&table.len(Split::HeldOut)),
        "{}",
        table.len(Split::HeldOut)
    );
}

#[test]
fn a_prompt_has_one_system_message_and_it_comes_first() {
    let dir = tempfile::tempdir().unwrap();
    let row = |i: usize, system: &str| {
        let messages = format!("{system}{{\"role\": \"user\", \"content\": \"Say {i}.\"}}");
        format!("{{\"prompt\": [{messages}]}}\n")
    };
    let own = "{\"role\": \"system\", \"content\": \"Be brief.\"}, ";
    let text: String = (0..4).map(|i| row(i, own)).collect();
    let mut settings = config(&file(&dir, "own.jsonl", &text));
    settings.prompt = None;
    settings.examples = vec![Example {
        user: "Say 9.".into(),
        assistant: "9".into(),
    }];
    let table = TableTaskset::open(settings.clone()).unwrap();
    let task = table.get(Split::Train, 0).unwrap();
    let said: Vec<String> = task
        .preamble
        .iter()
        .map(|m| m.content.text().into_owned())
        .collect();
    assert_eq!(said, ["Be brief.", "Say 9.", "9"]);
    settings.system = Some("Be long.".into());
    settings.source = Source::Files(file(&dir, "mixed.jsonl", &(row(7, "") + &text)));
    let error = TableTaskset::open(settings).unwrap_err().to_string();
    assert!(
        error.contains("mixed.jsonl, line 2: its messages have a system prompt"),
        "{error}"
    );
}
