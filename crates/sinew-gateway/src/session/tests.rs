//! Typical client behaviour, checked against the invariants.

use super::*;
use proptest::prelude::*;
use sinew_render::ChatRenderer;
use sinew_render::byte_renderer;
use sinew_types::{
    Message, PolicyVersion, Role, RouteSpan, SampledToken, TokenKind, ToolCall, ToolSpec, Trace,
};

const NOW: f64 = 1_000.0;

fn session(limits: SessionLimits) -> Session {
    Session::new(EpisodeId::new("e"), RolloutSpec::default(), limits, NOW)
}

fn wide() -> SessionLimits {
    SessionLimits {
        max_context_tokens: 1 << 20,
        ..SessionLimits::default()
    }
}

/// A model that outputs `text`, with a log-probability that identifies the output.
fn output(renderer: &ChatRenderer, text: &str, mark: f32, closed: bool) -> SampledTurn {
    let mut ids = renderer.encode_text(text).unwrap();
    let stop = renderer.stop_ids()[0];
    if closed {
        ids.push(stop);
    }
    let token = |id| SampledToken {
        id,
        logprob: -mark,
        version: PolicyVersion(7),
        top: Vec::new(),
        choice: None,
    };
    SampledTurn {
        tokens: ids.into_iter().map(token).collect(),
        temperature: 0.7,
        finish: if closed {
            FinishReason::StopId { id: stop }
        } else {
            FinishReason::Length
        },
        message: Message::new(Role::Assistant, text),
        text: text.into(),
        routes: None,
    }
}

/// One expert for each token of `from..to` that is asked for, as an engine reports them.
fn experts(from: u32, to: u32) -> Option<RouteSpan> {
    (from < to).then(|| RouteSpan {
        start: from,
        layers: 1,
        top_k: 1,
        wide: false,
        experts: (from..to).map(|position| position as u8).collect(),
    })
}

/// A line of a journal from before temperatures were kept.
#[test]
fn an_output_without_a_temperature_was_sampled_at_one() {
    let renderer = byte_renderer().unwrap();
    let output = output(&renderer, "hi", 0.5, true);
    let mut told = serde_json::to_value(&output).unwrap();
    assert_eq!(
        serde_json::from_value::<SampledTurn>(told.clone()).unwrap(),
        output
    );
    told.as_object_mut().unwrap().remove("temperature");
    let read: SampledTurn = serde_json::from_value(told).unwrap();
    assert_eq!(read.temperature, 1.0);
}

fn user(text: &str) -> Message {
    Message::new(Role::User, text)
}

/// A call of a prompt, with one choice and nothing else.
fn call_of(prompt: &Prompt) -> CallRequest<'_> {
    static IGNORED: Ignored = Ignored::new();
    CallRequest {
        prompt,
        known: None,
        tools: &[],
        opening: "",
        choices: 1,
        ignored: &IGNORED,
    }
}

struct Client {
    renderer: ChatRenderer,
    session: Session,
    tools: Vec<ToolSpec>,
    /// Prompt and sampled ids of every output.
    given: Vec<(Vec<TokenId>, Vec<TokenId>)>,
}

impl Client {
    fn new() -> Self {
        Self {
            renderer: byte_renderer().unwrap(),
            session: session(wide()),
            tools: Vec::new(),
            given: Vec::new(),
        }
    }

    /// Sends messages, lets the model answer `texts`, and returns the join.
    fn say(&mut self, messages: &[Message], texts: &[&str]) -> Join {
        let outputs: Vec<_> = texts.iter().map(|t| (*t, true)).collect();
        self.turn(messages, &outputs).join
    }

    fn turn(&mut self, messages: &[Message], texts: &[(&str, bool)]) -> CallStart {
        let prompt = Prompt::Messages(messages.to_vec());
        self.prompt(&prompt, texts)
    }

    fn prompt(&mut self, prompt: &Prompt, texts: &[(&str, bool)]) -> CallStart {
        let ask = CallRequest {
            tools: &self.tools,
            choices: texts.len() as u32,
            ..call_of(prompt)
        };
        let begun = self.session.begin(&self.renderer, &ask, NOW).unwrap();
        for (text, closed) in texts {
            let mark = (self.given.len() + 1) as f32 / 1024.0;
            let mut sampled = output(&self.renderer, text, mark, *closed);
            let ids: Vec<TokenId> = sampled.tokens.iter().map(|t| t.id).collect();
            // The last token of the output is not an input.
            let inputs = (begun.prompt.len() + ids.len()) as u32 - 1;
            sampled.routes = experts(begun.routes_known, inputs);
            self.given.push((begun.prompt.to_vec(), ids));
            self.session.commit(begun.call, sampled, NOW).unwrap();
        }
        begun
    }

    /// Everything that must hold of a finished trace.
    fn check(&self) -> Trace {
        let trace = self
            .session
            .trace(EpisodeEnd::Terminated, NOW + 1.0)
            .unwrap();
        let mut sampled = 0;
        for (id, node) in trace.nodes.iter().enumerate() {
            if node.kind != TokenKind::Sampled {
                continue;
            }
            // The mark identifies the output: each appears once.
            let index = (-node.logprobs[0] * 1024.0).round() as usize - 1;
            let (prompt, ids) = &self.given[index];
            assert_eq!(&node.tokens, ids, "output {index}");
            let path: Vec<_> = trace.path_tokens(id as NodeId);
            let seen: Vec<_> = path.iter().map(|t| t.id).collect();
            assert_eq!(seen, [prompt.as_slice(), ids.as_slice()].concat());
            let routes = trace.path_routes(id as NodeId);
            let known = RouteSpan::known(&routes) as usize;
            assert!(node.routes.is_empty() || known == path.len() - 1);
            for token in &path {
                let drawn = token.kind == TokenKind::Sampled;
                assert_eq!(token.logprob.is_some(), drawn);
                assert_eq!(token.version.is_some(), drawn);
            }
            sampled += 1;
        }
        let spoken = self.given.iter().filter(|(_, ids)| !ids.is_empty()).count();
        assert_eq!(sampled, spoken, "every output is in the trace once");
        trace
    }
}

#[test]
fn a_conversation_grows_token_for_token() {
    let mut c = Client::new();
    let mut messages = vec![user("hi")];
    assert_eq!(c.say(&messages, &["one"]), Join::Start);
    messages.extend([Message::new(Role::Assistant, "one"), user("more")]);
    assert_eq!(c.say(&messages, &["two"]), Join::Extend);
    let (before, after) = (&c.given[0], &c.given[1]);
    assert!(
        after
            .0
            .starts_with(&[before.0.clone(), before.1.clone()].concat())
    );
    let trace = c.check();
    assert_eq!(trace.leaves().len(), 1);
    let kinds: Vec<_> = trace.nodes.iter().map(|n| n.kind).collect();
    use TokenKind::{Observation, Prompt as P, Sampled};
    assert_eq!(kinds, [P, Sampled, Observation, Sampled]);
    assert_eq!(trace.nodes[3].turn, 2);
    assert_eq!(trace.outcome.metrics["join_extend"], 1.0);
}

#[test]
fn what_clients_drop_does_not_break_the_thread() {
    let mut c = Client::new();
    let ask = [user("hi")];
    let prompt = Prompt::Messages(ask.to_vec());
    let begun = c.session.begin(&c.renderer, &call_of(&prompt), NOW);
    let begun = begun.unwrap();
    let mut sampled = output(&c.renderer, "<think>x</think> y ", 1.0 / 1024.0, true);
    sampled.message.reasoning = Some("x".into());
    sampled.message.content = " y ".into();
    sampled.message.tool_calls = vec![ToolCall {
        id: "call_1".into(),
        name: "f".into(),
        arguments: serde_json::json!({"a": 1, "b": 2}),
    }];
    let mut told = sampled.message.clone();
    let ids = sampled.tokens.iter().map(|t| t.id).collect();
    c.given.push((begun.prompt.to_vec(), ids));
    c.session.commit(begun.call, sampled, NOW).unwrap();
    told.reasoning = None;
    told.content = "y".into();
    told.tool_calls[0].id = "mine".into();
    let again = [ask[0].clone(), told, user("go on")];
    assert_eq!(c.say(&again, &["z"]), Join::Realign);
    assert_eq!(c.check().leaves().len(), 1);
}

#[test]
fn rewritten_histories_branch_and_are_counted() {
    let mut c = Client::new();
    let a = |t: &str| Message::new(Role::Assistant, t);
    c.say(&[user("q")], &["one"]);
    // The same prompt again.
    assert_eq!(c.say(&[user("q")], &["two"]), Join::Resample);
    // The request continues the first answer, though there is a second.
    let first = [user("q"), a("one"), user("r")];
    assert_eq!(c.say(&first, &["three"]), Join::Extend);
    // Back to the first answer, another way.
    let back = [user("q"), a("one"), user("s")];
    assert_eq!(c.say(&back, &["four"]), Join::Rollback);
    // Words put into the model's mouth.
    let foreign = [user("q"), a("not mine"), user("r")];
    assert_eq!(c.say(&foreign, &["five"]), Join::Rollback);
    // The next request continues there: the foreign words are kept, too.
    let on = [user("q"), a("not mine"), user("r"), a("five"), user("t")];
    assert_eq!(c.say(&on, &["six"]), Join::Extend);
    // An earlier answer was edited away: nothing fits any more.
    let fork = [user("q"), user("r")];
    assert_eq!(c.say(&fork, &["seven"]), Join::Fork);
    // Another conversation is none of that.
    assert_eq!(c.say(&[user("other")], &["eight"]), Join::Start);
    let trace = c.check();
    let forced: Vec<_> = trace
        .nodes
        .iter()
        .filter(|n| n.kind == TokenKind::Forced)
        .collect();
    let said = c.renderer.decode(&forced[0].tokens);
    assert!(said.starts_with("not mine"), "{said}");
    let stats = c.session.stats();
    assert_eq!(stats.joins[&Join::Rollback], 2);
    assert!((stats.divergence_rate() - 3.0 / 8.0).abs() < 1e-12);
    // A full render of the rewritten conversation is what the model saw.
    let full = c.renderer.render_prompt(&foreign, &[]).unwrap();
    assert_eq!(c.given[4].0, full);
}

#[test]
fn other_tools_are_another_conversation() {
    let mut c = Client::new();
    c.say(&[user("q")], &["one"]);
    c.tools = vec![ToolSpec {
        name: "f".into(),
        description: String::new(),
        parameters: serde_json::json!({}),
    }];
    assert_eq!(c.say(&[user("q")], &["uno"]), Join::Start);
    // Tools that change in the middle rewrite the prompt of all earlier messages.
    c.tools[0].name = "g".into();
    let history = [user("q"), Message::new(Role::Assistant, "uno"), user("r")];
    assert_eq!(c.say(&history, &["two"]), Join::Fork);
    c.check();
}

#[test]
fn conversations_behind_one_prefix_are_starts() {
    let mut c = Client::new();
    let a = |t: &str| Message::new(Role::Assistant, t);
    // Short answers, which the model gives as well, and one that is long.
    let long = "the answer to this is a sentence of some length";
    let shots = [
        Message::new(Role::System, "be brief"),
        user("1 + 1?"),
        a("2"),
        user("why?"),
        a(long),
    ];
    for question in 0..10 {
        let mut messages = shots.to_vec();
        messages.push(user(&format!("{question} + 2?")));
        assert_eq!(c.say(&messages, &["2"]), Join::Start, "{question}");
        messages.extend([a("2"), user("sure?")]);
        assert_eq!(c.say(&messages, &["yes"]), Join::Extend, "{question}");
    }
    assert_eq!(c.session.stats().divergence_rate(), 0.0);
    // A shorter part of the prefix is no more a rewritten one.
    assert_eq!(c.say(&shots[..2], &["two"]), Join::Start);
    c.check();
}

#[test]
fn windows_and_summaries_are_forks() {
    let a = |t: &str| Message::new(Role::Assistant, t);
    let system = Message::new(Role::System, "be brief");
    let said = "I have looked into the first folder.";
    let mut called = a("");
    called.tool_calls = vec![ToolCall {
        id: "call_1".into(),
        name: "f".into(),
        arguments: serde_json::json!({}),
    }];
    let mut result = Message::new(Role::Tool, "42");
    result.tool_call_id = Some("call_1".into());
    let summary = user("Summary: both folders were looked into.");
    let rewritten: [&[Message]; 7] = [
        // A window that begins with a question, with an answer, and one after a summary.
        &[system.clone(), user("two"), a("ok"), user("three")],
        &[system.clone(), a("ok"), user("three")],
        &[system.clone(), summary.clone(), a(said), user("three")],
        // Only the result of a call is left.
        &[system.clone(), summary.clone(), result, user("three")],
        // The task is left, and a summary replaces the conversation.
        &[system.clone(), user("one"), summary.clone()],
        // Other instructions before the same conversation.
        &[user("one"), a(said), user("two"), a("ok"), user("three")],
        &[system.clone(), user("one"), a(said), summary],
    ];
    for (case, messages) in rewritten.into_iter().enumerate() {
        let mut c = Client::new();
        let mut history = vec![system.clone(), user("one")];
        assert_eq!(c.say(&history, &[said]), Join::Start);
        history.extend([a(said), user("two")]);
        assert_eq!(c.say(&history, &["ok"]), Join::Extend);
        c.session.graph.known_turns.add(None, &called, 3);
        // A turn after one of the model's own remaining turns is a branch of it.
        let expected = if case == 6 {
            Join::Rollback
        } else {
            Join::Fork
        };
        assert_eq!(c.say(messages, &["more"]), expected, "case {case}");
        c.check();
    }
}

#[test]
fn a_cut_turn_is_closed_by_forced_tokens() {
    let mut c = Client::new();
    c.turn(&[user("q")], &[("cut of", false)]);
    let on = [
        user("q"),
        Message::new(Role::Assistant, "cut of"),
        user("r"),
    ];
    assert_eq!(c.say(&on, &["two"]), Join::Extend);
    let trace = c.check();
    assert_eq!(trace.nodes[2].kind, TokenKind::Forced);
    assert_eq!(trace.nodes[2].tokens, c.renderer.stop_ids()[..1]);
}

#[test]
fn text_and_token_prompts_extend_too() {
    let mut c = Client::new();
    c.prompt(&Prompt::Text("ab".into()), &[("cd", false)]);
    let begun = c.prompt(&Prompt::Text("abcdef".into()), &[("g", false)]);
    assert_eq!(begun.join, Join::Extend);
    assert_eq!(c.renderer.decode(&begun.prompt), "abcdef");
    let again = c.prompt(&Prompt::Text("ab".into()), &[("xy", false)]);
    assert_eq!(again.join, Join::Resample);
    let ids = [begun.prompt.to_vec(), vec![b'g'.into(), b'!'.into()]].concat();
    let by_ids = c.prompt(&Prompt::Tokens(ids.clone()), &[("z", false)]);
    assert_eq!((by_ids.join, &*by_ids.prompt), (Join::Extend, &ids));
    let other = c.prompt(&Prompt::Tokens(vec![1, 2]), &[("z", false)]);
    assert_eq!(other.join, Join::Start);
    let beyond = Prompt::Tokens(vec![9999]);
    let refused = c.session.begin(&c.renderer, &call_of(&beyond), NOW);
    assert!(refused.unwrap_err().to_string().contains("9999"));
    c.check();
}

#[test]
fn a_forced_opening_is_no_sampled_token() {
    let mut c = Client::new();
    let prompt = Prompt::Messages(vec![user("q")]);
    let ask = CallRequest {
        opening: "<call>",
        ..call_of(&prompt)
    };
    let begun = c.session.begin(&c.renderer, &ask, NOW).unwrap();
    assert!(c.renderer.decode(&begun.prompt).ends_with("<call>"));
    let mut sampled = output(&c.renderer, "x", 1.0 / 1024.0, true);
    sampled.message.content = "<call>x".into();
    let ids = sampled.tokens.iter().map(|t| t.id).collect();
    c.given.push((begun.prompt.to_vec(), ids));
    c.session.commit(begun.call, sampled, NOW).unwrap();
    let on = [
        user("q"),
        Message::new(Role::Assistant, "<call>x"),
        user("r"),
    ];
    assert_eq!(c.say(&on, &["y"]), Join::Extend);
    assert_eq!(c.say(&[user("q")], &["z"]), Join::Resample);
    assert_eq!(c.check().nodes[1].kind, TokenKind::Forced);
}

#[test]
fn limits_end_the_episode_and_are_remembered() {
    let renderer = byte_renderer().unwrap();
    let limits = SessionLimits {
        max_turns: 2,
        max_concurrent: 1,
        max_context_tokens: 64,
        ..SessionLimits::default()
    };
    let mut s = session(limits);
    let (short, long) = (
        Prompt::Messages(vec![user("q")]),
        Prompt::Messages(vec![user(&"q".repeat(64))]),
    );
    let begin = |s: &mut Session, prompt: &Prompt| s.begin(&renderer, &call_of(prompt), NOW);
    let call = begin(&mut s, &short).unwrap().call;
    let busy = begin(&mut s, &short).unwrap_err();
    assert!(matches!(busy, SessionError::Concurrent { running: 1, .. }));
    assert_eq!(s.natural_end(), EpisodeEnd::Terminated);
    s.fail(call, "engine", NOW);
    // A failed call is not counted as a turn.
    for _ in 0..2 {
        let call = begin(&mut s, &short).unwrap().call;
        s.commit(call, output(&renderer, "a", 0.5, true), NOW)
            .unwrap();
    }
    let over = begin(&mut s, &short).unwrap_err();
    assert!(matches!(over, SessionError::Turns { limit: 2 }));
    let limit = Limit::Turns;
    assert_eq!(s.natural_end(), EpisodeEnd::Truncated { limit });
    // An answer that its limit of tokens cut is not whole; one that follows may be.
    let mut s = session(limits);
    for (ended, end) in [
        (
            false,
            EpisodeEnd::Truncated {
                limit: Limit::TurnTokens,
            },
        ),
        (true, EpisodeEnd::Terminated),
    ] {
        let call = begin(&mut s, &short).unwrap().call;
        s.commit(call, output(&renderer, "a", 0.5, ended), NOW)
            .unwrap();
        assert_eq!(s.natural_end(), end);
    }
    let mut s = session(limits);
    let full = begin(&mut s, &long).unwrap_err();
    assert!(matches!(full, SessionError::ContextFull { .. }));
    assert!(s.calls().is_empty() && s.snapshot(NOW).nodes.is_empty());
    let limit = Limit::Context;
    assert_eq!(s.natural_end(), EpisodeEnd::Truncated { limit });
    s.close();
    assert!(matches!(begin(&mut s, &short), Err(SessionError::Over)));
}

fn reward(value: f64, metrics: &[&str]) -> Reward {
    Reward {
        reward: value,
        metrics: metrics.iter().map(|name| ((*name).into(), 1.0)).collect(),
        ..Reward::default()
    }
}

#[test]
fn rewards_are_bounded_in_size_number_and_bytes() {
    let limits = SessionLimits {
        max_metrics: 2,
        max_reward_bytes: 1_000,
        ..SessionLimits::default()
    };
    let mut s = session(limits);
    for huge in [1e308, -1e31, f64::INFINITY, f64::NAN] {
        let refused = s.reward(&reward(huge, &[])).unwrap_err();
        assert!(matches!(refused, SessionError::Reward { .. }), "{refused}");
    }
    let outcome = s.snapshot(NOW).outcome;
    let why = outcome.unscored_reason.unwrap();
    assert!(
        outcome.unscored && why.contains("magnitude up to 1e30"),
        "{why}"
    );
    s.reward(&reward(1e30, &["a", "b"])).unwrap();
    let refused = s.reward(&reward(1.0, &["c"])).unwrap_err();
    assert!(matches!(
        refused,
        SessionError::Metrics { names: 3, limit: 2 }
    ));
    let long = "x".repeat(129);
    let refused = s.reward(&reward(1.0, &[&long])).unwrap_err();
    assert!(matches!(refused, SessionError::MetricName { bytes: 129 }));
    let refused = (0..100).find_map(|_| s.reward(&reward(2.0, &["a"])).err());
    assert!(matches!(refused, Some(SessionError::RewardBytes { .. })));
    let outcome = s.snapshot(NOW).outcome;
    assert_eq!((outcome.reward, outcome.unscored), (2.0, false));
    assert_eq!((outcome.metrics.len(), outcome.unscored_reason), (2, None));
}

/// An accepted reward is in the trace. A reward after the trace was made is refused, with the place where it
/// should go.
#[test]
fn a_reward_is_in_the_trace_or_refused() {
    let mut s = session(SessionLimits::default());
    s.reward(&reward(0.5, &[])).unwrap();
    let trace = s.trace(EpisodeEnd::Terminated, NOW).unwrap();
    s.seal();
    let refused = s.reward(&reward(1.0, &[])).unwrap_err();
    assert!(refused.to_string().contains("/rewards/NAME"), "{refused}");
    assert_eq!(trace.outcome.reward, 0.5);
    assert_eq!(s.snapshot(NOW).outcome, trace.outcome);
}

#[test]
fn what_the_engine_may_not_do_is_refused() {
    let mut c = Client::new();
    let prompt = Prompt::Messages(vec![user("q")]);
    let ask = call_of(&prompt);
    let call = c.session.begin(&c.renderer, &ask, NOW).unwrap().call;
    let bad = output(&c.renderer, "x", f32::NAN, true);
    let broken = c.session.commit(call, bad.clone(), NOW).unwrap_err();
    assert!(matches!(broken, SessionError::Broken(_)));
    let unknown = c.session.commit(call, bad, NOW).unwrap_err();
    assert!(matches!(unknown, SessionError::UnknownCall { call: 1 }));
    assert_eq!(c.session.stats().failed, 1);
    // Damage to what was captured does not get into a trace.
    c.say(&[user("q")], &["a"]);
    c.session.graph.nodes[0].tokens[0] += 1;
    let error = c.session.trace(EpisodeEnd::Terminated, NOW).unwrap_err();
    assert!(error.to_string().contains("other tokens"), "{error}");
}

#[test]
fn rewards_reach_episode_and_turns() {
    let mut c = Client::new();
    c.say(&[user("q")], &["a", "b"]);
    let reward = |value: f64, turn| Reward {
        reward: value,
        turn,
        ..Reward::default()
    };
    c.session.reward(&reward(0.5, None)).unwrap();
    c.session.reward(&reward(0.25, Some(1))).unwrap();
    assert!(c.session.reward(&reward(f64::NAN, None)).is_err());
    assert!(c.session.reward(&reward(1.0, Some(2))).is_err());
    assert!(c.session.reward(&reward(1.0, Some(0))).is_err());
    assert_eq!(c.check().total_reward(), 1.0);
}

#[test]
fn a_session_is_made_again_from_what_happened() {
    let mut c = Client::new();
    c.session.keep_entries();
    let mut told = Vec::new();
    let mut messages = vec![user("q")];
    c.turn(&messages, &[("one", true), ("uno", false)]);
    told.extend(c.session.take_entries());
    messages.extend([Message::new(Role::Assistant, "one"), user("r")]);
    c.say(&messages, &["two"]);
    c.prompt(&Prompt::Text("ab".into()), &[("cd", false)]);
    c.session
        .reward(&Reward {
            reward: 2.0,
            ..Reward::default()
        })
        .unwrap();
    let prompt = Prompt::Messages(vec![user("lost")]);
    let ask = call_of(&prompt);
    let lost = c.session.begin(&c.renderer, &ask, NOW).unwrap().call;
    told.extend(c.session.take_entries());
    let text = serde_json::to_string(&told).unwrap();
    let read: Vec<Entry> = serde_json::from_str(&text).unwrap();
    let again = session(wide()).restore(read.clone(), NOW).unwrap();
    // The running call has failed and has no turn; all else is the same.
    c.session.fail(lost, "the gateway was restarted", NOW);
    assert_eq!(again.calls(), c.session.calls());
    assert_eq!(again.stats(), c.session.stats());
    c.session = again;
    messages.extend([Message::new(Role::Assistant, "two"), user("s")]);
    assert_eq!(c.say(&messages, &["three"]), Join::Extend);
    let text = Prompt::Text("abcd!".into());
    assert_eq!(c.prompt(&text, &[("e", false)]).join, Join::Extend);
    assert_eq!(c.check().outcome.reward, 2.0);
    // Entries that do not belong together are refused.
    for start in 1..read.len() {
        let torn = session(wide()).restore(read[start..].to_vec(), NOW);
        assert!(torn.is_err() || start + 2 >= read.len(), "from {start}");
    }
}

#[test]
fn only_what_is_new_need_be_told() {
    let mut c = Client::new();
    let told = |c: &mut Client, known, messages: Vec<Message>, text: &str| {
        let prompt = Prompt::Messages(messages);
        let ask = CallRequest {
            known,
            ..call_of(&prompt)
        };
        let begun = c.session.begin(&c.renderer, &ask, NOW)?;
        let body = |more| format!(r#"{{"messages":["{}"{more}]}}"#, begun.call);
        let scan = |c: &Client, more| c.session.bodies().scan(body(more).as_bytes(), "messages");
        let read = scan(c, "").unwrap();
        let id = begun.call;
        c.session.remember(id, body("").as_bytes(), &read, [0; 16]);
        let (seen, _) = scan(c, ",0").unwrap().cut.unwrap();
        let state = seen.state;
        let mark = (c.given.len() + 1) as f32 / 1024.0;
        let sampled = output(&c.renderer, text, mark, true);
        let ids = sampled.tokens.iter().map(|t| t.id).collect();
        c.given.push((begun.prompt.to_vec(), ids));
        c.session.commit(begun.call, sampled, NOW)?;
        Ok::<_, SessionError>((state, begun))
    };
    let a = |text: &str| Message::new(Role::Assistant, text);
    let (first, _) = told(&mut c, None, vec![user("q")], "one").unwrap();
    let (second, begun) = told(&mut c, Some(first), vec![a("one"), user("r")], "two").unwrap();
    assert_eq!(begun.join, Join::Extend);
    let whole = [user("q"), a("one"), user("r"), a("two"), user("s")];
    let (third, begun) = told(&mut c, None, whole.to_vec(), "three").unwrap();
    assert_eq!(begun.join, Join::Extend);
    let again = [user("q"), a("one"), user("r"), a("two"), user("s")];
    assert_eq!(c.say(&again, &["tres"]), Join::Resample);
    let (same, begun) = told(&mut c, Some(second), vec![a("two"), user("s")], "3").unwrap();
    assert_eq!((same, begun.join), (third, Join::Resample));
    // A continuation that cannot be joined there needs the full history.
    let other = told(&mut c, Some(second), vec![user("s")], "x").unwrap_err();
    assert!(matches!(other, SessionError::NeedsAll));
    c.check();
}

/// A step of a client.
#[derive(Clone, Debug)]
enum Step {
    /// Goes on after output `from`, with so many messages, some of them tools'.
    Continue {
        from: usize,
        texts: Vec<String>,
        tool: bool,
    },
    /// The same prompt as output `from`.
    Again {
        from: usize,
        n: usize,
    },
    /// Other words in place of output `from`.
    Rewrite {
        from: usize,
        text: String,
    },
    /// Adds white space around the text of output `from`.
    Loosen {
        from: usize,
        text: String,
    },
    New {
        text: String,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let text = || "[ab]{0,3}";
    prop_oneof![
        4 => (any::<usize>(), prop::collection::vec(text(), 1..3), any::<bool>())
            .prop_map(|(from, texts, tool)| Step::Continue { from, texts, tool }),
        1 => (any::<usize>(), 1usize..3).prop_map(|(from, n)| Step::Again { from, n }),
        1 => (any::<usize>(), text()).prop_map(|(from, text)| Step::Rewrite { from, text }),
        1 => (any::<usize>(), text()).prop_map(|(from, text)| Step::Loosen { from, text }),
        1 => text().prop_map(|text| Step::New { text }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever clients do, every sampled token is in the trace once, on the path of exactly
    /// what the engine was given; nothing else has a log-probability.
    #[test]
    fn every_sampled_token_is_captured_once(
        steps in prop::collection::vec((step(), any::<bool>(), "[ab]{0,2}"), 1..14),
    ) {
        let mut c = Client::new();
        // Question and text of each output.
        let mut seen: Vec<(Vec<Message>, String)> = Vec::new();
        for (step, closed, said) in steps {
            let assistant = |text: &str| Message::new(Role::Assistant, text);
            let pick = |from: usize| &seen[from % seen.len()];
            let (messages, n) = match step {
                _ if seen.is_empty() => (vec![user("a")], 1),
                Step::New { text } => (vec![user(&text)], 1),
                Step::Again { from, n } => (pick(from).0.clone(), n),
                Step::Continue { from, texts, tool } => {
                    let (mut messages, answer) = pick(from).clone();
                    messages.push(assistant(&answer));
                    let role = if tool { Role::Tool } else { Role::User };
                    messages.extend(texts.iter().map(|t| Message::new(role, t.as_str())));
                    (messages, 1)
                }
                Step::Rewrite { from, text } => {
                    let mut messages = pick(from).0.clone();
                    messages.extend([assistant(&text), user("go on")]);
                    (messages, 1)
                }
                Step::Loosen { from, text } => {
                    let (mut messages, answer) = pick(from).clone();
                    messages.extend([assistant(&format!(" {answer}\n")), user(&text)]);
                    (messages, 1)
                }
            };
            let outputs = vec![(said.as_str(), closed); n];
            let begun = c.turn(&messages, &outputs);
            if begun.join == Join::Start || begun.join == Join::Fork {
                let full = c.renderer.render_prompt(&messages, &[]).unwrap();
                prop_assert_eq!(begun.prompt.to_vec(), full);
            }
            seen.push((messages, said));
        }
        c.check();
    }
}
