//! Adapts messages to the model's template: images become a note, and system messages in the middle of a
//! conversation become user messages if the template does not support them.

use sinew_dialect::{Ignored, count_ignored};
use sinew_render::Renderer;
use sinew_types::{Content, Message, Part, Role};

/// System message of the trial conversation; templates do not change it.
const TRIAL: &str = "sinewlaterinstruction";

/// Message roles that a template supports, found by a trial.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompts {
    /// Whether the template shows system messages after the first message.
    later_system: bool,
}

impl Prompts {
    /// Renders a trial conversation with the template of a model.
    pub(crate) fn of(renderer: &dyn Renderer) -> Self {
        let say = |role, text: &str| Message::new(role, text);
        let trial = [
            say(Role::System, "a"),
            say(Role::System, TRIAL),
            say(Role::User, "b"),
            say(Role::Assistant, "c"),
            say(Role::User, "d"),
            say(Role::System, TRIAL),
        ];
        let shown = renderer.render_prompt(&trial, &[]).is_ok_and(|ids| {
            let text = renderer.decode_with_special(&ids);
            text.matches(TRIAL).count() == 2
        });
        Self {
            later_system: shown,
        }
    }

    /// Adapts messages to the template. `later` means that other messages come before them.
    pub(crate) fn adapt(self, messages: &mut [Message], later: bool) {
        for (i, message) in messages.iter_mut().enumerate() {
            if message.content.first_media().is_some() {
                message.content = without_media(&message.content);
            }
            if !self.later_system && message.role == Role::System && (later || i > 0) {
                message.role = Role::User;
            }
        }
    }
}

/// Counts the content parts that the model does not see.
pub(crate) fn note_media(messages: &[Message], ignored: &mut Ignored) {
    for part in messages.iter().flat_map(|m| m.content.parts().iter()) {
        if !matches!(part, Part::Text { .. }) {
            let path = format!("messages[].content[] of type {}", part.kind());
            count_ignored(ignored, &path, 1);
        }
    }
}

/// Replaces each image and sound by a note, since no supported model accepts them.
fn without_media(content: &Content) -> Content {
    let mut text = Content::new();
    for part in content.parts() {
        match part {
            Part::Text { text: said } => text.push_text(said),
            media => text.push_text(&format!("[{}: this model reads text only]", media.kind())),
        }
    }
    text
}
