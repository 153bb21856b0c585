//! Tickets and traces for tests.

use crate::ticket::Ticket;
use sinew_rollout::RunInfo;
use sinew_types::{
    EpisodeId, GroupId, Lineage, NO_PARENT, Node, PolicyVersion, SamplingParams, Task, TaskId,
    TokenKind, Trace, VersionSpan,
};

/// A ticket with a number.
pub(crate) fn ticket(fence: u64, number: u64) -> Ticket {
    Ticket {
        fence,
        number,
        refusals: 0,
        episode: EpisodeId::new(format!("d{number:08}-e0")),
        group: GroupId::new(format!("d{number:08}")),
        draw: number,
        purpose: "train".into(),
        seed: 5,
        task: Task {
            id: TaskId::new("t"),
            kind: "k".into(),
            preamble: Vec::new(),
            prompt: "p".into(),
            data: serde_json::json!({"answer": 4}),
            seed: 1,
        },
        temperature: None,
        max_turns: 2,
        version: 0,
        lineage: Lineage::default().to_string(),
    }
}

/// A valid trace of a ticket, sampled by one version.
pub(crate) fn trace(ticket: &Ticket, version: u64) -> Trace {
    let spec = ticket.spec();
    let mut trace = spec.empty_trace(&RunInfo::default(), &SamplingParams::default());
    let prompt = Node::given(NO_PARENT, 0, TokenKind::Prompt, vec![1, 2], Vec::new());
    let mut turn = Node::given(0, 1, TokenKind::Sampled, vec![3, 4], Vec::new());
    turn.logprobs = vec![-0.5, -0.5];
    turn.temperature = 1.0;
    turn.versions = VersionSpan::whole(2, PolicyVersion(version));
    trace.nodes = vec![prompt, turn];
    trace
}
