use super::*;
use sinew_types::{Message, NO_PARENT, Node, PolicyVersion, TokenKind, VersionSpan};

fn spec() -> EpisodeSpec {
    EpisodeSpec {
        episode: sinew_types::EpisodeId::new("e"),
        group: sinew_types::GroupId::new("g"),
        task: sinew_types::Task {
            id: sinew_types::TaskId::new("t"),
            kind: "k".into(),
            prompt: "p".into(),
            ..sinew_types::Task::default()
        },
        draw: 1,
        purpose: "train".into(),
        seed: 7,
    }
}

fn trace(says: &[&str]) -> Trace {
    let sampling = sinew_types::SamplingParams::default();
    let mut trace = spec().empty_trace(&crate::RunInfo::default(), &sampling);
    let node = |text: &&str| {
        let said = vec![Message::new(Role::Assistant, *text)];
        Node {
            logprobs: vec![-0.1],
            versions: vec![VersionSpan {
                start: 0,
                len: 1,
                version: PolicyVersion(0),
            }],
            ..Node::given(NO_PARENT, 1, TokenKind::Sampled, vec![1], said)
        }
    };
    trace.nodes = says.iter().map(node).collect();
    trace
}

fn ended(ending: Ending, stderr: &str) -> ProgramEnd {
    ProgramEnd {
        ending,
        stdout: String::new(),
        stderr: stderr.into(),
        value: None,
        refused: false,
    }
}

/// A program that ended well: what it printed, and the value of a function.
fn said(stdout: &str, value: Option<serde_json::Value>) -> ProgramEnd {
    let good = ended(Ending::Exited { code: 0 }, "");
    ProgramEnd {
        stdout: stdout.into(),
        value,
        ..good
    }
}

#[test]
fn the_answer_is_the_last_printed_line_else_the_last_message() {
    let trace_of = trace(&["first", "Answer: 2"]);
    assert_eq!(
        answer(&said("log\nAnswer: 1\n\n", None), None, &trace_of),
        "Answer: 1"
    );
    assert_eq!(answer(&said(" \n", None), None, &trace_of), "Answer: 2");
    assert_eq!(answer(&said("", None), None, &trace(&[])), "");
}

#[test]
fn the_value_of_a_function_is_its_answer_whatever_is_printed() {
    let trace_of = trace(&["of the model"]);
    let of = |value| answer(&said("printed\n", Some(value)), None, &trace_of);
    assert_eq!(of(serde_json::json!("two\nlines\n")), "two\nlines\n");
    assert_eq!(of(serde_json::Value::Null), "of the model");
    assert_eq!(of(serde_json::json!({"a": 1})), "{\"a\":1}");
}

#[test]
fn bad_ends_are_failures_and_limits_are_not() {
    let said = trace(&["x"]);
    let good = ended(Ending::Exited { code: 0 }, "");
    assert_eq!(failure(&good, None, &said), None);
    let crash = ended(Ending::Exited { code: 1 }, "Traceback\nValueError: bad\n");
    let why = failure(&crash, None, &said).unwrap();
    assert!(
        why.contains("exit code 1") && why.contains("ValueError: bad"),
        "{why}"
    );
    let killed = failure(&ended(Ending::Signalled { signal: 9 }, ""), None, &said).unwrap();
    assert!(killed.contains("(signalled 9)"), "{killed}");
    let memory = failure(&ended(Ending::OutOfMemory, ""), None, &said).unwrap();
    assert!(memory.contains("(out_of_memory)"), "{memory}");
    let silent = failure(&good, None, &trace(&[])).unwrap();
    assert!(
        silent.contains("without an answer of the model (exited 0; does"),
        "{silent}"
    );
    assert_eq!(failure(&ended(Ending::Timeout, ""), None, &said), None);
    let mut cut = said;
    cut.end = EpisodeEnd::Truncated {
        limit: Limit::Turns,
    };
    assert_eq!(failure(&crash, None, &cut), None);
    assert!(bad_exit(&crash).is_some() && bad_exit(&good).is_none());
}

#[test]
fn coding_agents_are_read_in_their_own_form() {
    let agent = &sinew_agents::CODEX;
    let said_last = "{\"item\":{\"type\":\"agent_message\",\"text\":\"It is\\n391\"}}\n{\"type\":\"turn.completed\"}";
    let ended_well = said(said_last, None);
    let told = agent.end(&ended_well.stdout);
    assert_eq!(
        answer(&ended_well, Some(&told), &trace(&["x"])),
        "It is\n391"
    );
    let failed = said(
        "{\"type\":\"turn.failed\",\"error\":{\"message\":\"no room\"}}",
        None,
    );
    let told = agent.end(&failed.stdout);
    assert_eq!(
        answer(&failed, Some(&told), &trace(&["of the model"])),
        "of the model"
    );
    let crash = ended(Ending::Exited { code: 1 }, "noise");
    let why = failure(&crash, Some(&told), &trace(&["x"])).unwrap();
    assert!(
        why.contains("exit code 1") && why.contains("no room"),
        "{why}"
    );
}

#[test]
fn the_end_of_a_text_is_cut_between_characters() {
    assert_eq!(tail("a\n\nb\n"), "a | b");
    let long = tail(&"é".repeat(1000));
    assert!(long.len() <= 600 && long.chars().all(|c| c == 'é'));
}
