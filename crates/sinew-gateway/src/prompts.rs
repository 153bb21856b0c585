//! Messages in the form that the model's template accepts: images become a note, and instructions in the
//! middle of a conversation become the user's if the template has none there.

use sinew_dialect::{Ignored, count_ignored};
use sinew_render::Renderer;
use sinew_types::{Content, Message, Part, Role};

/// Instruction of the trial conversation; templates do not change it.
const TRIAL: &str = "sinewlaterinstruction";

/// The roles that a template takes, found by trial.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompts {
    /// Messages of role system after the first message are shown.
    later_system: bool,
}

impl Prompts {
    /// Tries the template of a model.
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

    /// Changes messages to what the template takes. `later`: others come before them.
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

/// Counts the parts that the model is not shown.
pub(crate) fn note_media(messages: &[Message], ignored: &mut Ignored) {
    for part in messages.iter().flat_map(|m| m.content.parts().iter()) {
        if !matches!(part, Part::Text { .. }) {
            let path = format!("messages[].content[] of type {}", part.kind());
            count_ignored(ignored, &path, 1);
        }
    }
}

/// A content with a note in the place of each image and sound: no model that runs here takes them.
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
