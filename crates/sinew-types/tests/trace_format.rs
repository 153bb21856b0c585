//! A stored trace is read, an unreadable one is refused by name, and nothing is lost on the way.

use proptest::prelude::*;
use serde_json::{Value, json};
use sinew_types::{
    AdapterName, Component, Content, EpisodeEnd, EpisodeId, GroupId, Media, MediaSource, Message,
    NO_PARENT, Node, Origin, Outcome, Part, PolicyVersion, Provenance, Role, Sampling,
    TRACE_FORMAT_VERSION, TaskId, Timing, TokenKind, ToolCall, Trace, VersionSpan,
};

const STORED: &str = include_str!("data/trace.json");

fn value(text: &str) -> Value {
    serde_json::from_str(text).expect("the text of a test is JSON")
}

#[test]
fn a_stored_trace_is_read_and_written_as_it_is() {
    let trace: Trace = serde_json::from_str(STORED).unwrap();
    trace.validate().unwrap();
    assert_eq!(trace.origin.purpose, "eval-before");
    let format = trace.nodes[1].format.as_ref().unwrap();
    assert!(format.masked() && format.forced(1));
    assert_eq!(format.masks[4], u64::MAX);
    assert_eq!(trace.ignored["presence_penalty"], 2);
    assert!(trace.outcome.unscored && trace.provenance.is_empty());
    // The trace goes through text, in which a number of 32 bits has as many digits as it needs.
    let written = value(&serde_json::to_string(&trace).unwrap());
    assert_eq!(written, value(STORED));
    assert_eq!(serde_json::from_value::<Trace>(written).unwrap(), trace);
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    let refused = |named: &str, edit: &dyn Fn(&mut Value)| {
        let mut stored = value(STORED);
        edit(&mut stored);
        let error = serde_json::from_value::<Trace>(stored).unwrap_err();
        assert!(error.to_string().contains(named), "{named}: {error}");
    };
    let remove = |field: &'static str| {
        move |v: &mut Value| {
            v.as_object_mut().unwrap().remove(field);
        }
    };
    for version in [0, 2, 4, u32::MAX] {
        let named = format!("format version {version}, this program reads 3");
        refused(&named, &|v| v["format_version"] = json!(version));
    }
    refused("origin", &remove("origin"));
    refused("nodes", &remove("nodes"));
    refused("draw", &|v| v["origin"] = json!({"purpose": "train"}));
    refused("colour", &|v| v["provenance"] = json!({"colour": "red"}));
    refused("text, image or audio", &|v| {
        v["nodes"][0]["messages"][0]["content"] = json!({"text": "x"});
    });
}

fn part() -> impl Strategy<Value = Part> {
    let source = prop_oneof![
        "https://[a-z]{1,8}/[a-z]{0,4}".prop_map(MediaSource::Url),
        "[0-9a-f]{64}".prop_map(MediaSource::Blake3),
    ];
    let media_type = prop::option::of("[a-z]{2,5}/[a-z]{2,5}");
    let media = (source, media_type).prop_map(|(source, media_type)| Media { source, media_type });
    prop_oneof![
        3 => ".{0,12}".prop_map(|text| Part::Text { text }),
        1 => media.clone().prop_map(Part::Image),
        1 => media.prop_map(Part::Audio),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    let role = prop::sample::select(vec![Role::System, Role::User, Role::Assistant, Role::Tool]);
    let call = (".{0,4}", "[a-z]{1,4}", any::<i32>()).prop_map(|(id, name, x)| ToolCall {
        id,
        name,
        arguments: json!({ "x": x }),
    });
    let parts = prop::collection::vec(part(), 0..4);
    let calls = prop::collection::vec(call, 0..2);
    (role, parts, prop::option::of(".{0,6}"), calls).prop_map(
        |(role, parts, reasoning, tool_calls)| Message {
            reasoning,
            tool_calls,
            ..Message::new(role, parts.into_iter().collect::<Content>())
        },
    )
}

fn provenance() -> impl Strategy<Value = Provenance> {
    let sampling = (0.0f32..2.0, 1u32..99).prop_map(|(temperature, max_tokens)| Sampling {
        temperature,
        top_p: 0.9,
        top_k: 40,
        min_p: 0.05,
        max_tokens,
    });
    let text = || prop::option::of("[a-z0-9]{1,9}");
    (
        prop::option::of(any::<u64>()),
        prop::option::of(any::<u64>()),
        prop::option::of(("[a-z]{1,6}", "[0-9]{1,2}")),
        prop::option::of(sampling),
        (text(), text(), text(), text()),
        prop::collection::btree_map("[a-z]{1,4}", "[0-9]{1,2}", 0..3),
    )
        .prop_map(|(task_seed, seed, environment, sampling, texts, tools)| {
            let (chat_template, kernels, sandbox, adapter) = texts;
            Provenance {
                template: Default::default(),
                task_seed,
                seed,
                environment: environment.map(|(name, version)| Component { name, version }),
                sampling,
                chat_template,
                tools,
                kernels,
                logprobs_unknown: false,
                adapter: adapter.map(|name| AdapterName::new(&name).expect("letters and digits")),
                sandbox,
            }
        })
}

fn trace() -> impl Strategy<Value = Trace> {
    let external = prop::option::of("[a-z0-9-]{1,9}");
    let origin = ("[a-z0-9]{0,6}", any::<u64>(), "[a-z-]{1,9}", external);
    let origin = origin.prop_map(|(run, draw, purpose, external)| Origin {
        run,
        draw,
        purpose,
        external,
    });
    let messages = prop::collection::vec(message(), 0..4);
    let logprobs = prop::collection::vec(-30.0f32..0.0, 1..6);
    (origin, provenance(), messages, logprobs).prop_map(
        |(origin, provenance, messages, logprobs)| {
            let len = logprobs.len() as u32;
            let prompt = Node::given(NO_PARENT, 0, TokenKind::Prompt, vec![1, 2], messages);
            let sampled = Node {
                logprobs,
                versions: vec![VersionSpan {
                    start: 0,
                    len,
                    version: PolicyVersion(7),
                }],
                ..Node::given(0, 1, TokenKind::Sampled, (0..len).collect(), Vec::new())
            };
            Trace {
                format_version: TRACE_FORMAT_VERSION,
                episode: EpisodeId::new("d00000042-e3"),
                group: GroupId::new("d00000042"),
                task: TaskId::new("t"),
                task_kind: "k".into(),
                origin,
                provenance,
                nodes: vec![prompt, sampled],
                outcome: Outcome::default(),
                end: EpisodeEnd::Terminated,
                timing: Timing::default(),
                ignored: Default::default(),
            }
        },
    )
}

proptest! {
    #[test]
    fn a_trace_survives_writing_and_reading(trace in trace()) {
        trace.validate().unwrap();
        let text = serde_json::to_string(&trace).unwrap();
        prop_assert_eq!(serde_json::from_str::<Trace>(&text).unwrap(), trace);
    }

    /// Bytes that are not a trace are refused, never misread.
    #[test]
    fn garbage_is_refused(at in 0usize..2000, byte in any::<u8>()) {
        let mut bytes = STORED.as_bytes().to_vec();
        let at = at % bytes.len();
        bytes[at] = byte;
        if let Ok(trace) = serde_json::from_slice::<Trace>(&bytes) {
            prop_assert_eq!(trace.format_version, TRACE_FORMAT_VERSION);
            let _ = trace.validate();
        }
    }
}
