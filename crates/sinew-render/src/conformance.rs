//! Gate before training: bridged ids must equal a full render of the same messages.
//!
//! Scripted turns stand in for sampled ones: their text is tokenized once as the model's turn
//! and closed with the stop token. What [`Renderer::extend`] then appends must give, token by
//! token, what the template renders for the whole conversation.

use crate::renderer::{Mismatch, RenderError, Renderer};
use sinew_types::{FinishReason, Message, Role, TokenId, ToolSpec};

/// A conversation to play: everything but assistant messages is given to the renderer as the
/// environment would, assistant messages play the model.
#[derive(Clone, Debug, PartialEq)]
pub struct MockTrajectory {
    pub name: String,
    pub messages: Vec<Message>,
    pub tools: Vec<ToolSpec>,
}

impl MockTrajectory {
    /// An environment's own start, followed by two turns that say `turn` with `observation`
    /// between them.
    pub fn around(
        name: &str,
        start: &[Message],
        tools: &[ToolSpec],
        turn: &str,
        observation: &[Message],
    ) -> Self {
        let turn = [Message::new(Role::Assistant, turn)];
        Self {
            name: name.to_owned(),
            messages: [start, &turn, observation, &turn].concat(),
            tools: tools.to_vec(),
        }
    }

    /// The conversations every renderer is held to: one and several observations after a turn,
    /// by the `tool` and by the `user` role. `text` is the content of all messages; it should
    /// not begin or end with whitespace, which some templates trim from the model's turns.
    pub fn standard(system: Option<&str>, text: &str) -> Vec<Self> {
        let say = |role, n: usize| Message::new(role, text.repeat(n));
        let head = |turns: &[Message]| {
            let mut messages: Vec<_> = system
                .map(|s| Message::new(Role::System, s))
                .into_iter()
                .collect();
            messages.push(say(Role::User, 2));
            messages.extend_from_slice(turns);
            messages
        };
        let mock = |name: &str, turns: &[Message]| Self {
            name: name.to_owned(),
            messages: head(turns),
            tools: Vec::new(),
        };
        let a = say(Role::Assistant, 1);
        let u = say(Role::User, 1);
        let t = say(Role::Tool, 3);
        vec![
            mock("user answers", &[a.clone(), u.clone(), a.clone()]),
            mock(
                "tool answers",
                &[a.clone(), t.clone(), a.clone(), t.clone(), a.clone()],
            ),
            mock("two tools answer", &[a.clone(), t.clone(), t.clone(), a]),
        ]
    }
}

/// One compared join.
#[derive(Clone, Debug, PartialEq)]
pub struct ConformanceStep {
    pub trajectory: String,
    /// Index of the assistant message before the join.
    pub message: usize,
    /// Tokens compared.
    pub tokens: usize,
}

/// What was compared; a mismatch is an error instead.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConformanceReport {
    pub steps: Vec<ConformanceStep>,
    /// Conversations that the template itself refuses, with its reason.
    pub refused: Vec<(String, String)>,
}

/// Plays every trajectory through [`Renderer::extend`], on the CPU and without a model, and
/// compares with full renders; training on a renderer that fails this is refused. The first
/// difference is [`RenderError::Mismatch`]. Trajectories whose full render the template refuses
/// are reported; it is an error if all are.
pub fn conformance_check(
    renderer: &dyn Renderer,
    trajectories: &[MockTrajectory],
) -> Result<ConformanceReport, RenderError> {
    let mut report = ConformanceReport::default();
    for trajectory in trajectories {
        match renderer.render_prompt(&trajectory.messages, &trajectory.tools) {
            Ok(_) => play(renderer, trajectory, &mut report)?,
            Err(e) => report
                .refused
                .push((trajectory.name.clone(), e.to_string())),
        }
    }
    match report.refused.first() {
        Some((name, why)) if report.steps.is_empty() => Err(RenderError::Join(format!(
            "the template refuses every trajectory; {name}: {why}"
        ))),
        _ => Ok(report),
    }
}

fn play(
    renderer: &dyn Renderer,
    trajectory: &MockTrajectory,
    report: &mut ConformanceReport,
) -> Result<(), RenderError> {
    let stop = *renderer
        .stop_ids()
        .first()
        .ok_or_else(|| RenderError::NoStopToken {
            hint: "a renderer must have at least one".into(),
        })?;
    let (messages, tools) = (&trajectory.messages, &trajectory.tools);
    let first = messages
        .iter()
        .position(|m| m.role == Role::Assistant)
        .unwrap_or(messages.len());
    let mut bridged = renderer.render_prompt(&messages[..first], tools)?;
    let mut at = first;
    while at < messages.len() {
        bridged.extend(renderer.encode_text(&messages[at].content)?);
        bridged.push(stop);
        let next = messages[at + 1..]
            .iter()
            .position(|m| m.role == Role::Assistant)
            .map_or(messages.len(), |n| at + 1 + n);
        if next == at + 1 {
            // The last turn, or one that nothing answers: there is no join after it.
            break;
        }
        let finish = FinishReason::StopId { id: stop };
        let extension = renderer.extend(&bridged, &finish, &messages[at + 1..next], tools)?;
        bridged.extend(extension.forced);
        bridged.extend(extension.observation);
        let full = renderer.render_prompt(&messages[..next], tools)?;
        compare(renderer, trajectory, at, &bridged, &full)?;
        report.steps.push(ConformanceStep {
            trajectory: trajectory.name.clone(),
            message: at,
            tokens: bridged.len(),
        });
        at = next;
    }
    Ok(())
}

fn compare(
    renderer: &dyn Renderer,
    trajectory: &MockTrajectory,
    message: usize,
    bridged: &[TokenId],
    full: &[TokenId],
) -> Result<(), RenderError> {
    let index = bridged
        .iter()
        .zip(full)
        .position(|(a, b)| a != b)
        .unwrap_or(bridged.len().min(full.len()));
    if index == bridged.len() && index == full.len() {
        return Ok(());
    }
    let context =
        |ids: &[TokenId]| renderer.decode_with_special(&ids[index.saturating_sub(8)..index]);
    let token = |ids: &[TokenId]| {
        ids.get(index)
            .map(|&id| renderer.decode_with_special(&[id]))
    };
    Err(RenderError::Mismatch(Box::new(Mismatch {
        trajectory: trajectory.name.clone(),
        message,
        index,
        bridged: token(bridged),
        full: token(full),
        bridged_context: context(bridged),
        full_context: context(full),
    })))
}
