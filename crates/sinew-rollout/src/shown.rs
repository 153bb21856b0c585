//! Contexts as a server renders them, for `thinking = "dropped"`: where the chat template leaves thinking
//! out of the history, a new context begins.

use sinew_render::{Likeness, RenderError, Renderer};
use sinew_types::{BranchCause, Message, Thinking, TokenId, ToolSpec};

/// A context that begins, its messages, and the cause.
pub(crate) type NewContext = (BranchCause, Vec<TokenId>, Vec<Message>);

/// The messages since the context began, as a client would send them. Not recorded where thinking is kept, or
/// where the template has none.
#[derive(Debug, Default)]
pub(crate) struct ShownHistory(Option<Vec<Message>>);

impl ShownHistory {
    /// The history of a context that begins with these messages.
    pub(crate) fn begin(thinking: Thinking, renderer: &dyn Renderer, messages: &[Message]) -> Self {
        let drops = thinking == Thinking::Dropped && renderer.turn_format().reasoning.is_some();
        Self(drops.then(|| messages.to_vec()))
    }

    /// Adds a turn and what followed it. Returns the render of all messages, all of them, and the cause why a
    /// new context begins, if the render has other words than `context`.
    ///
    /// # Errors
    /// If the template refuses the messages.
    pub(crate) fn follow(
        &mut self,
        renderer: &dyn Renderer,
        tools: &[ToolSpec],
        context: &[&[TokenId]],
        new: impl IntoIterator<Item = Message>,
    ) -> Result<Option<NewContext>, RenderError> {
        let Some(messages) = &mut self.0 else {
            return Ok(None);
        };
        messages.extend(new);
        let prompt = renderer.render_prompt(messages, tools)?;
        let cause = match Likeness::of(renderer, &context.concat(), &prompt) {
            likeness if likeness.same_words() => return Ok(None),
            Likeness::Reasoning => BranchCause::DroppedThinking,
            _ => BranchCause::TemplateRewrite,
        };
        Ok(Some((cause, prompt, messages.clone())))
    }
}
