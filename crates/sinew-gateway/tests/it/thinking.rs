//! Long sessions with thinking: paths of an episode by what clients and templates do with earlier thinking.
//!
//! Turns are what the template writes for the model, in the tokens of [`ChatRenderer::of_template`].

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use sinew_dialect::{Ignored, Prompt};
use sinew_gateway::session::{CallRequest, SampledTurn, Session};
use sinew_gateway::{Join, RolloutSpec, SessionLimits};
use sinew_render::{ChatRenderer, Likeness, Renderer};
use sinew_types::{
    BranchCause, EpisodeEnd, EpisodeId, FinishReason, Message, NodeId, PolicyVersion, Role,
    SampledToken, Thinking, TokenId, TokenKind, ToolCall, ToolSpec, Trace,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const NOW: f64 = 1_000.0;

/// Templates with thinking: Qwen 3.5, GLM 4.7, DeepSeek V3.2, gpt-oss.
fn templates() -> Vec<(&'static str, ChatRenderer)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let ours = |name: &str| root.join(format!("crates/sinew-render/tests/templates/{name}.jinja"));
    let gpt_oss = root.join(".cache/templates/trl/gptoss.jinja");
    let with = |options: Value| options.as_object().cloned().unwrap();
    let read = |path: PathBuf, options: Map<String, Value>| {
        let source = std::fs::read_to_string(&path);
        let source =
            source.unwrap_or_else(|e| panic!("{e}: {}: run scripts/setup.sh", path.display()));
        ChatRenderer::of_template(&source, options).unwrap()
    };
    vec![
        ("qwen3.5", read(ours("qwen3.5"), Map::new())),
        ("glm-4.7", read(ours("glm-4.7"), Map::new())),
        (
            "deepseek-v3.2",
            read(
                ours("deepseek-v3.2"),
                with(json!({"enable_thinking": true})),
            ),
        ),
        (
            "gpt-oss",
            read(gpt_oss, with(json!({"date": "2026-01-31"}))),
        ),
    ]
}

fn tool() -> ToolSpec {
    ToolSpec {
        name: "look".into(),
        description: "Looks.".into(),
        parameters: json!({"type": "object", "properties": {"at": {"type": "string"}}}),
    }
}

/// An agent, its model and its rollout.
struct Agent<'r> {
    renderer: &'r ChatRenderer,
    session: Session,
    thinking: Thinking,
    /// Whether the client sends thinking back.
    returns: bool,
    system: &'static str,
    messages: Vec<Message>,
    turns: usize,
    /// Prompt and sampled ids of every output.
    given: Vec<(Vec<TokenId>, Vec<TokenId>)>,
    joins: Vec<Join>,
}

impl<'r> Agent<'r> {
    fn new(renderer: &'r ChatRenderer, thinking: Thinking, returns: bool) -> Self {
        let spec = RolloutSpec {
            thinking: Some(thinking),
            ..RolloutSpec::default()
        };
        let limits = SessionLimits {
            max_context_tokens: 1 << 20,
            ..SessionLimits::default()
        };
        Self {
            renderer,
            session: Session::new(EpisodeId::new("e"), spec, limits, NOW),
            thinking,
            returns,
            system: "Be brief.",
            messages: Vec::new(),
            turns: 0,
            given: Vec::new(),
            joins: Vec::new(),
        }
    }

    /// Asks a question, at the end of the conversation.
    fn ask(&mut self, text: &str) {
        if self.messages.is_empty() {
            let system = Message::new(Role::System, self.system);
            self.messages.push(system);
        }
        self.messages.push(Message::new(Role::User, text));
    }

    /// Samples a turn after the messages, and adds it to them as the client sends it back.
    fn turn(&mut self, calls: usize) {
        self.turns += 1;
        let number = self.turns;
        let call = |index| ToolCall {
            id: format!("call{number:04}{index}"),
            name: "look".into(),
            arguments: json!({"at": format!("place {number}")}),
        };
        let content = if calls == 0 {
            format!("Answer {number}.")
        } else {
            String::new()
        };
        let said = Message {
            reasoning: Some(format!("Thought {number}.")),
            tool_calls: (0..calls).map(call).collect(),
            ..Message::new(Role::Assistant, content)
        };
        self.sample(&said);
        let mut returned = said.clone();
        if !self.returns {
            returned.reasoning = None;
        }
        self.messages.push(returned);
        for call in said.tool_calls {
            self.messages.push(Message {
                tool_call_id: Some(call.id),
                name: Some(call.name),
                ..Message::new(Role::Tool, format!("seen {number}"))
            });
        }
    }

    /// Samples a turn of these words.
    fn say(&mut self, text: &str) {
        let said = Message {
            reasoning: Some("Thought.".into()),
            ..Message::new(Role::Assistant, text)
        };
        self.sample(&said);
        self.messages.push(said);
    }

    /// One call of the model, which answers `said`.
    fn sample(&mut self, said: &Message) {
        let tools = [tool()];
        let prompt = Prompt::Messages(self.messages.clone());
        let ask = CallRequest {
            prompt: &prompt,
            known: None,
            tools: &tools,
            opening: "",
            choices: 1,
            ignored: &Ignored::new(),
        };
        let begun = self.session.begin(self.renderer, &ask, NOW).unwrap();
        let full = self.renderer.render_prompt(&self.messages, &tools).unwrap();
        let likeness = Likeness::of(self.renderer, &begun.prompt, &full);
        if self.thinking == Thinking::Dropped {
            assert!(likeness.same_words(), "{:?}: {likeness:?}", begun.join);
        }
        let whole = [self.messages.as_slice(), std::slice::from_ref(said)].concat();
        let ids = self.renderer.render_turn(&whole, &tools).unwrap();
        let mark = -((self.given.len() + 1) as f32) / 1024.0;
        let token = |&id: &TokenId| SampledToken {
            id,
            logprob: mark,
            version: PolicyVersion(7),
            top: Vec::new(),
            choice: None,
        };
        let finish = match ids.last() {
            Some(&id) if self.renderer.stop_ids().contains(&id) => FinishReason::StopId { id },
            _ => FinishReason::Length,
        };
        let output = SampledTurn {
            tokens: ids.iter().map(token).collect(),
            temperature: 1.0,
            finish,
            message: said.clone(),
            text: String::new(),
            routes: None,
        };
        self.session.commit(begun.call, output, NOW).unwrap();
        self.given.push((begun.prompt.to_vec(), ids));
        self.joins.push(begun.join);
    }

    /// The trace. Every sampled token is in one node, behind the tokens that the engine was given.
    fn check(&self) -> Trace {
        let trace = self.session.trace(EpisodeEnd::Terminated, NOW).unwrap();
        let mut seen = vec![0; self.given.len()];
        for (id, node) in trace.nodes.iter().enumerate() {
            if node.kind != TokenKind::Sampled {
                continue;
            }
            let index = (-node.logprobs[0] * 1024.0).round() as usize - 1;
            seen[index] += 1;
            let (prompt, ids) = &self.given[index];
            let path = trace.path_tokens(id as NodeId);
            let path: Vec<_> = path.iter().map(|t| t.id).collect();
            assert_eq!(
                path,
                [prompt.as_slice(), ids.as_slice()].concat(),
                "{index}"
            );
        }
        assert!(seen.iter().all(|&times| times == 1), "{seen:?}");
        let branches: u32 = trace.branches().values().sum();
        assert_eq!(
            trace.leaves().len(),
            1 + branches as usize,
            "{:?}",
            trace.branches()
        );
        trace
    }
}

/// Three questions of ten turns: nine with calls, of which every third has two, and an answer.
fn thirty_turns(agent: &mut Agent<'_>) {
    for question in 0..3 {
        agent.ask(&format!("Question {question}?"));
        for turn in 0..10 {
            let calls = match turn {
                9 => 0,
                turn if turn % 3 == 2 => 2,
                _ => 1,
            };
            agent.turn(calls);
        }
    }
}

#[test]
fn thirty_turns_with_kept_thinking_are_one_path() {
    for (name, renderer) in templates() {
        for returns in [true, false] {
            let mut agent = Agent::new(&renderer, Thinking::Kept, returns);
            thirty_turns(&mut agent);
            let trace = agent.check();
            assert_eq!(trace.leaves().len(), 1, "{name}, returned: {returns}");
            assert_eq!(trace.outcome.metrics.get("branch_dropped_thinking"), None);
            let expected = if returns { Join::Extend } else { Join::Realign };
            assert!(agent.joins[1..].iter().all(|j| *j == expected), "{name}");
        }
    }
}

/// With the thinking of a question in the context of its own turns, an episode has a path a question.
#[test]
fn dropped_thinking_begins_a_path_where_the_template_drops_it() {
    for (name, renderer) in templates() {
        let mut agent = Agent::new(&renderer, Thinking::Dropped, true);
        thirty_turns(&mut agent);
        let trace = agent.check();
        assert_eq!(trace.leaves().len(), 3, "{name}: {:?}", agent.joins);
        let branches = trace.branches();
        assert_eq!(branches[&BranchCause::DroppedThinking], 2, "{name}");
        assert_eq!(trace.outcome.metrics["branch_dropped_thinking"], 2.0);
        let dropped = agent.joins.iter().filter(|j| **j == Join::Dropped);
        assert_eq!(dropped.count(), 2, "{name}");
    }
}

/// A client that never returns thinking has a path a turn. They share their history, except for one of them.
#[test]
fn clients_that_leave_thinking_out_have_a_path_a_turn_with_a_common_history() {
    for (name, renderer) in templates() {
        let mut agent = Agent::new(&renderer, Thinking::Dropped, false);
        agent.ask("Question?");
        for _ in 0..30 {
            agent.turn(1);
        }
        let trace = agent.check();
        assert_eq!(trace.leaves().len(), 30, "{name}");
        let stored: usize = trace.nodes.iter().map(|n| n.tokens.len()).sum();
        let last = &agent.given[29];
        let longest = last.0.len() + last.1.len();
        assert!(stored < 4 * longest, "{name}: {stored} of {longest} tokens");
    }
}

#[test]
fn branches_are_named_by_their_causes() {
    let (_, renderer) = templates().remove(0);
    for thinking in [Thinking::Kept, Thinking::Dropped] {
        let mut agent = Agent::new(&renderer, thinking, true);
        agent.ask("Find the book.");
        for _ in 0..4 {
            agent.turn(1);
        }
        // The client replaces what was done by a summary.
        let long = agent.messages.clone();
        agent.messages.truncate(2);
        agent.ask("So far, four places were searched.");
        agent.turn(1);
        let told = "The book is in none of the five places that were searched so far.";
        agent.say(told);
        // Or it begins anew with a summary that the model wrote.
        agent.messages.clear();
        agent.ask(&format!("This goes on from here:\n{told}"));
        agent.turn(0);
        // A sub-agent has instructions of its own.
        agent.messages.clear();
        agent.system = "You read books.";
        agent.ask("Read it.");
        agent.turn(0);
        // Another conversation with the first instructions.
        agent.messages.clear();
        agent.system = "Be brief.";
        agent.ask("Another matter.");
        agent.turn(0);
        // The first conversation again: its last question is sampled once more.
        agent.messages = long[..long.len() - 2].to_vec();
        agent.turn(1);
        // The client puts words in place of a turn.
        agent.messages = long[..2].to_vec();
        agent
            .messages
            .push(Message::new(Role::Assistant, "I have found it."));
        agent.ask("Where?");
        agent.turn(0);
        let branches = agent.check().branches();
        let expected = BTreeMap::from([
            (BranchCause::Compaction, 2),
            (BranchCause::SubAgent, 1),
            (BranchCause::NewConversation, 1),
            (BranchCause::EditedHistory, 1),
            (BranchCause::Resample, 1),
        ]);
        assert_eq!(branches, expected, "{thinking:?}");
    }
}

/// A step of a random session.
#[derive(Clone, Copy, Debug)]
enum Step {
    Turn(usize),
    Ask,
    /// Drops the oldest messages and keeps this many.
    Compact(usize),
    /// Goes back to the first messages.
    Back(usize),
    SubAgent,
    Forget,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0usize..3).prop_map(Step::Turn),
        3 => Just(Step::Ask),
        1 => (1usize..4).prop_map(Step::Compact),
        1 => (1usize..6).prop_map(Step::Back),
        1 => Just(Step::SubAgent),
        1 => Just(Step::Forget),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever clients do with their histories, no sampled token is lost, each is in one place, and every
    /// path but the first has a cause.
    #[test]
    fn sampled_tokens_are_in_one_place_and_branches_have_causes(
        steps in prop::collection::vec(step(), 1..24),
        dropped in any::<bool>(),
        returns in any::<bool>(),
        which in 0usize..2,
    ) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sinew-render/tests/templates");
        let name = ["qwen3.5", "glm-4.7"][which];
        let source = std::fs::read_to_string(root.join(format!("{name}.jinja"))).unwrap();
        let renderer = ChatRenderer::of_template(&source, Map::new()).unwrap();
        let thinking = if dropped { Thinking::Dropped } else { Thinking::Kept };
        let mut agent = Agent::new(&renderer, thinking, returns);
        agent.ask("Begin.");
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Turn(calls) => {
                    // A server answers questions and results.
                    if agent.messages.last().is_some_and(|m| m.role == Role::Assistant) {
                        agent.ask(&format!("Go on, {number}."));
                    }
                    agent.turn(calls);
                }
                Step::Ask => agent.ask(&format!("Question {number}?")),
                Step::Compact(kept) => {
                    let from = agent.messages.len().saturating_sub(kept);
                    let mut kept = agent.messages.split_off(from);
                    // Results need their calls, and templates have instructions at the start.
                    kept.retain(|m| match m.role {
                        Role::User => true,
                        Role::Assistant => m.tool_calls.is_empty(),
                        Role::System | Role::Tool => false,
                    });
                    agent.messages.clear();
                    agent.ask(&format!("Summary {number}."));
                    agent.messages.extend(kept);
                    agent.ask("And?");
                }
                Step::Back(kept) => {
                    agent.messages.truncate(kept.max(2));
                    while agent.messages.last().is_some_and(|m| m.role != Role::User) {
                        agent.messages.pop();
                    }
                }
                Step::SubAgent => {
                    let (messages, system) = (std::mem::take(&mut agent.messages), agent.system);
                    agent.system = "You are a helper.";
                    agent.ask(&format!("Help {number}."));
                    agent.turn(0);
                    (agent.messages, agent.system) = (messages, system);
                }
                // The client loses the thinking that it had.
                Step::Forget => agent.messages.iter_mut().for_each(|m| m.reasoning = None),
            }
        }
        if agent.turns == 0 {
            agent.turn(0);
        }
        agent.check();
    }
}
