use super::*;

#[test]
fn a_changed_part_is_named_as_far_as_both_are_known() {
    let versions = |list: &[(&str, &str)]| {
        let list = list.iter();
        list.map(|(name, version)| ((*name).to_owned(), (*version).to_owned()))
            .collect::<BTreeMap<_, _>>()
    };
    let info = |environment: Option<&str>, tools: &[(&str, &str)]| RunInfo {
        provenance: Provenance {
            environment: environment.map(|version| Component {
                name: "shop".into(),
                version: version.into(),
            }),
            tools: versions(tools),
            ..Provenance::default()
        },
        ..RunInfo::default()
    };
    let was = info(Some("1"), &[("buy", "1"), ("reward.f.py:f", "aa")]);
    let trace = spec().empty_trace(&was, &SamplingParams::default());
    let now = |environment, tools| info(environment, tools).changed_since(&trace);
    let same = [("buy", "1"), ("reward.f.py:f", "aa")];
    assert_eq!(now(Some("1"), &same), None);
    assert_eq!(now(None, &same), None);
    let changed = now(Some("2"), &same).unwrap();
    assert_eq!(changed, "environment shop 1, now shop 2");
    assert_eq!(now(Some("1"), &same[1..]).unwrap(), "tool buy");
    let other = [("buy", "2"), ("reward.f.py:f", "aa")];
    assert_eq!(now(Some("1"), &other).unwrap(), "tool buy");
    let other = [("buy", "1"), ("reward.f.py:f", "bb")];
    assert_eq!(now(Some("1"), &other).unwrap(), "reward.f.py:f");
    let without = now(Some("1"), &same[..1]).unwrap();
    assert_eq!(without, "reward.f.py:f");
}
use proptest::prelude::*;
use sinew_types::PolicyVersion;

fn spec() -> EpisodeSpec {
    EpisodeSpec {
        episode: EpisodeId::new("e"),
        group: GroupId::new("g"),
        task: Task {
            id: TaskId::new("t"),
            kind: "k".into(),
            ..Task::default()
        },
        draw: 1,
        purpose: "train".into(),
        seed: 7,
    }
}

fn machine(max_turns: u32, max_context_tokens: u32) -> EpisodeMachine {
    let limits = EpisodeLimits {
        max_turns,
        max_turn_tokens: 8,
        max_context_tokens,
    };
    let trace = spec().empty_trace(&RunInfo::default(), &SamplingParams::default());
    EpisodeMachine::new(trace, limits, 0.7)
}

#[test]
fn a_trace_names_the_environment_of_its_task() {
    let component = |name: &str| Component {
        name: name.into(),
        version: "1".into(),
    };
    let mut run = RunInfo::default();
    run.provenance.environment = Some(component("all"));
    run.members.insert("web".into(), component("web"));
    let mut spec = spec();
    for (task, environment) in [("web:rows/train/0", "web"), ("rows/train/0", "all")] {
        spec.task.id = TaskId::new(task);
        let trace = spec.empty_trace(&run, &SamplingParams::default());
        assert_eq!(trace.environment(), environment);
    }
    let unknown = spec.empty_trace(&RunInfo::default(), &SamplingParams::default());
    assert_eq!(unknown.environment(), "k");
}

fn token(id: TokenId, version: u64) -> SampledToken {
    SampledToken {
        id,
        logprob: -0.25,
        version: PolicyVersion(version),
        top: Vec::new(),
        choice: None,
    }
}

fn observed(observation: &[TokenId]) -> EpisodeEvent {
    EpisodeEvent::Observed {
        forced: Vec::new(),
        observation: observation.to_vec(),
        messages: Vec::new(),
        process_reward: 0.1,
        state_hash: None,
    }
}

/// Each turn asks for the experts that earlier turns have not reported, from the start of its context.
#[test]
fn experts_are_recorded_once_for_each_token() {
    let span = |start: u32, experts: &[u8]| RouteSpan {
        start,
        layers: 1,
        top_k: 1,
        wide: false,
        experts: experts.into(),
    };
    let mut m = machine(9, 100);
    m.on_event(EpisodeEvent::Reset {
        prompt: vec![1, 2],
        messages: Vec::new(),
        state_hash: None,
    });
    assert_eq!(m.routes_known(), 0);
    m.on_event(EpisodeEvent::Tokens(vec![token(3, 4), token(4, 4)]));
    m.routed(span(0, &[1, 2, 3]));
    m.on_event(EpisodeEvent::TurnFinished(FinishReason::Length));
    m.on_event(observed(&[9]));
    assert_eq!(m.routes_known(), 3);
    // This one reports nothing.
    m.on_event(EpisodeEvent::Tokens(vec![token(5, 4)]));
    m.on_event(EpisodeEvent::TurnFinished(FinishReason::Length));
    m.on_event(observed(&[9]));
    assert_eq!(m.routes_known(), 3);
    m.on_event(EpisodeEvent::Tokens(vec![token(6, 4)]));
    m.routed(span(3, &[4, 5, 6, 7]));
    assert_eq!(m.routes_known(), 7);
    m.on_event(EpisodeEvent::TurnFinished(FinishReason::Length));
    m.on_event(EpisodeEvent::Renewed {
        cause: sinew_types::BranchCause::Compaction,
        prompt: vec![1],
        messages: Vec::new(),
        process_reward: 0.0,
        state_hash: None,
    });
    assert_eq!(m.routes_known(), 0, "a new context");
    let trace = m.into_trace(Timing::default());
    trace.validate().unwrap();
    let leaf = trace.leaves()[0];
    assert_eq!(RouteSpan::known(&trace.path_routes(leaf)), 7);
}

#[test]
fn two_turns_leave_a_valid_trace() {
    let mut m = machine(3, 100);
    let prompt = EpisodeEvent::Reset {
        prompt: vec![1, 2],
        messages: Vec::new(),
        state_hash: Some(17),
    };
    assert_eq!(
        m.on_event(prompt),
        EpisodeCommand::Generate { max_tokens: 8 }
    );
    m.on_event(EpisodeEvent::Tokens(vec![token(3, 4)]));
    m.on_event(EpisodeEvent::Tokens(vec![token(4, 5)]));
    let step = m.on_event(EpisodeEvent::TurnFinished(FinishReason::Length));
    assert_eq!(step, EpisodeCommand::Step);
    assert_eq!(m.turn_tokens(), [3, 4]);
    let go_on = m.on_event(observed(&[9]));
    assert_eq!(go_on, EpisodeCommand::Generate { max_tokens: 8 });
    m.on_event(EpisodeEvent::Tokens(vec![token(5, 5)]));
    m.on_event(EpisodeEvent::TurnFinished(FinishReason::StopId { id: 5 }));
    let outcome = Outcome {
        reward: 1.0,
        success: true,
        ..Outcome::default()
    };
    let done = EpisodeEvent::Done {
        outcome,
        process_reward: 0.0,
    };
    assert_eq!(m.on_event(done), EpisodeCommand::Finish);
    let context = m.context().to_vec();
    let trace = m.into_trace(Timing::default());
    trace.validate().unwrap();
    let leaf = trace.leaves()[0];
    let ids: Vec<_> = trace.path_tokens(leaf).iter().map(|t| t.id).collect();
    assert_eq!(ids, context);
    assert_eq!(ids, [1, 2, 3, 4, 9, 5]);
    assert_eq!(trace.nodes[0].state_hash, Some(17));
    let temperatures: Vec<_> = trace.nodes.iter().map(|n| n.temperature).collect();
    assert_eq!(temperatures, [1.0, 0.7, 1.0, 0.7]);
    assert_eq!(trace.nodes[1].versions.len(), 2);
    assert!((trace.total_reward() - 1.1).abs() < 1e-12);
    assert_eq!(trace.end, EpisodeEnd::Terminated);
}

#[test]
fn a_world_that_does_not_start_and_a_score_that_does_not_come_are_failures() {
    let environment_failed = |m: EpisodeMachine| {
        let trace = m.into_trace(Timing::default());
        trace.validate().unwrap();
        let kind = FailureKind::Environment;
        matches!(trace.end, EpisodeEnd::Failed { kind: k, .. } if k == kind)
    };
    let mut never_up = machine(1, 100);
    let end = never_up.on_event(EpisodeEvent::Deadline);
    assert_eq!(end, EpisodeCommand::Finish);
    assert!(environment_failed(never_up));

    let mut m = machine(1, 100);
    m.on_event(EpisodeEvent::Reset {
        prompt: vec![1],
        messages: Vec::new(),
        state_hash: None,
    });
    assert_eq!(m.on_event(EpisodeEvent::Deadline), EpisodeCommand::Score);
    assert_eq!(m.on_event(EpisodeEvent::Deadline), EpisodeCommand::Finish);
    assert!(environment_failed(m));
}

#[test]
fn limits_truncate_and_are_scored() {
    let mut m = machine(1, 100);
    m.on_event(EpisodeEvent::Reset {
        prompt: vec![1],
        messages: Vec::new(),
        state_hash: None,
    });
    m.on_event(EpisodeEvent::TurnFinished(FinishReason::Length));
    assert_eq!(m.on_event(observed(&[9])), EpisodeCommand::Score);
    let done = EpisodeEvent::Done {
        outcome: Outcome::default(),
        process_reward: 0.0,
    };
    assert_eq!(m.on_event(done), EpisodeCommand::Finish);
    let end = m.into_trace(Timing::default()).end;
    assert_eq!(
        end,
        EpisodeEnd::Truncated {
            limit: Limit::Turns
        }
    );
}

#[test]
fn an_answer_that_a_limit_cut_is_truncated_also_where_the_environment_is_done() {
    let end = |context, sampled: u32, reason| {
        let mut m = machine(3, context);
        m.on_event(EpisodeEvent::Reset {
            prompt: vec![1],
            messages: Vec::new(),
            state_hash: None,
        });
        let tokens = (0..sampled).map(|i| token(i, 1)).collect();
        m.on_event(EpisodeEvent::Tokens(tokens));
        m.on_event(EpisodeEvent::TurnFinished(reason));
        m.on_event(EpisodeEvent::Done {
            outcome: Outcome::default(),
            process_reward: 1.0,
        });
        let trace = m.into_trace(Timing::default());
        assert_eq!(trace.total_reward(), 1.0, "it is scored");
        trace.end
    };
    let cut = |limit| EpisodeEnd::Truncated { limit };
    assert_eq!(end(100, 8, FinishReason::Length), cut(Limit::TurnTokens));
    assert_eq!(end(6, 5, FinishReason::Length), cut(Limit::Context));
    assert_eq!(end(100, 5, FinishReason::ContextFull), cut(Limit::Context));
    // The last token that the limit allows may be the end of the answer.
    for reason in [
        FinishReason::StopId { id: 7 },
        FinishReason::StopString { text: "x".into() },
    ] {
        assert_eq!(end(100, 8, reason), EpisodeEnd::Terminated);
    }
}

#[test]
fn a_full_context_truncates_instead_of_sampling_nothing() {
    let mut m = machine(3, 2);
    let prompt = EpisodeEvent::Reset {
        prompt: vec![1, 2],
        messages: Vec::new(),
        state_hash: Some(17),
    };
    assert_eq!(m.on_event(prompt), EpisodeCommand::Score);
}

/// A long episode moves its context only where the buffer grows, by doubling, and never for a request.
#[test]
fn requests_share_the_context() {
    let (turns, per_turn) = (200, 8);
    let mut m = machine(turns, 100_000);
    m.on_event(EpisodeEvent::Reset {
        prompt: vec![1, 2],
        messages: Vec::new(),
        state_hash: None,
    });
    let mut buffers = std::collections::BTreeSet::new();
    for turn in 0..turns {
        // The engine holds the prompt while it samples, and drops it before the last event.
        let held = m.shared_context();
        assert_eq!(held.as_ptr(), m.context().as_ptr());
        buffers.insert(held.as_ptr() as usize);
        let tokens = (0..per_turn).map(|i| token(turn * per_turn + i, 1));
        m.on_event(EpisodeEvent::Tokens(tokens.collect()));
        assert_eq!(
            held.as_ptr(),
            m.context().as_ptr(),
            "nothing was copied meanwhile"
        );
        drop(held);
        m.on_event(EpisodeEvent::TurnFinished(FinishReason::Length));
        m.on_event(observed(&[9, 9]));
    }
    let length = m.context().len();
    assert_eq!(
        length,
        2 + (turns * per_turn) as usize + 2 * (turns as usize - 1)
    );
    let doublings = length.ilog2() as usize + 1;
    assert!(buffers.len() <= doublings, "{} buffers", buffers.len());
}

proptest! {
    /// Whatever comes in whatever order, the trace stays valid and spells the context.
    #[test]
    fn any_order_of_events_keeps_the_invariants(kinds in prop::collection::vec(0u8..7, 0..40)) {
        let mut m = machine(4, 60);
        for (i, kind) in kinds.iter().enumerate() {
            let id = i as TokenId;
            let event = match kind {
                0 => EpisodeEvent::Reset { prompt: vec![id, id], messages: Vec::new(), state_hash: None },
                1 => EpisodeEvent::Tokens(vec![token(id, u64::from(id / 3))]),
                2 => EpisodeEvent::TurnFinished(FinishReason::Length),
                3 => observed(&[id, id]),
                4 => EpisodeEvent::Done { outcome: Outcome::default(), process_reward: 0.0 },
                5 => EpisodeEvent::Deadline,
                _ => EpisodeEvent::Tokens(vec![token(id, 1), token(id, 2)]),
            };
            m.on_event(event);
        }
        // A turn that is being sampled is not in the context yet.
        m.on_event(EpisodeEvent::Deadline);
        let context = m.context().to_vec();
        let trace = m.into_trace(Timing::default());
        prop_assert!(trace.validate().is_ok());
        let spelled: Vec<_> = match trace.leaves().last() {
            Some(&leaf) => trace.path_tokens(leaf).iter().map(|t| t.id).collect(),
            None => Vec::new(),
        };
        prop_assert_eq!(spelled, context);
    }
}
