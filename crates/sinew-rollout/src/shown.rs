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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Map;
    use sinew_render::ChatRenderer;
    use sinew_types::{FinishReason, Role};

    /// ChatML that drops the thinking before the last question.
    const DROPS: &str = "{% set at = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}\
        {% set at.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
        {% if m.role == 'assistant' and m.reasoning_content and loop.index0 > at.last %}\
        <think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

    #[test]
    fn a_context_begins_where_the_template_drops_thinking() {
        let renderer = ChatRenderer::of_template(DROPS, Map::new()).unwrap();
        let asked = [Message::new(Role::User, "one?")];
        let mut said = Message::new(Role::Assistant, "1");
        said.reasoning = Some("hm".into());
        let follow = |history: &mut ShownHistory, answer: Message| {
            let mut context = renderer.render_prompt(&asked, &[]).unwrap();
            let whole = [&asked[..], &[said.clone()]].concat();
            context.extend(renderer.render_turn(&whole, &[]).unwrap());
            let id = *context.last().unwrap();
            let stop = FinishReason::StopId { id };
            let answers = [answer.clone()];
            let extension = renderer.extend(&context, &stop, &answers, &[]).unwrap();
            let tokens = [context.as_slice(), extension.observation.as_slice()];
            history
                .follow(&renderer, &[], &tokens, [said.clone(), answer])
                .unwrap()
        };
        let mut kept = ShownHistory::begin(Thinking::Kept, &renderer, &asked);
        assert!(follow(&mut kept, Message::new(Role::User, "two?")).is_none());
        // A result of a tool is no question: the thinking stays.
        let mut dropped = ShownHistory::begin(Thinking::Dropped, &renderer, &asked);
        assert!(follow(&mut dropped, Message::new(Role::Tool, "3")).is_none());
        let mut dropped = ShownHistory::begin(Thinking::Dropped, &renderer, &asked);
        let new = follow(&mut dropped, Message::new(Role::User, "two?"));
        let (cause, prompt, messages) = new.unwrap();
        assert_eq!((cause, messages.len()), (BranchCause::DroppedThinking, 3));
        let text = renderer.decode_with_special(&prompt);
        assert!(!text.contains("hm") && text.contains("two?"), "{text}");
    }
}
