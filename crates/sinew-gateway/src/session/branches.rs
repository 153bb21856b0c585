//! Causes of branches, by what a request has in common with the captured conversations.
//!
//! | the request | cause |
//! |---|---|
//! | has none of the model's turns left, or has one of them earlier than it was | `compaction` |
//! | has the model's turns in their places, after other messages | `edited_history` |
//! | the same with tools that no conversation has | `changed_tools` |
//! | is another conversation, whose messages quote a turn of the model | `compaction` |
//! | is another conversation, with other instructions or tools | `sub_agent` |
//! | is another conversation with the same ones | `new_conversation` |
//! | continues a turn that was continued before | `earlier_point` |
//! | has words in place of a turn | `edited_history` |

use super::graph::Graph;
use super::types::Join;
use crate::keys;
use sinew_types::{BranchCause, Message, NodeId, Role, TokenKind, ToolSpec};

/// Minimum bytes of a line that is quoted, and not said again by chance.
const QUOTED_BYTES: usize = 48;

impl Graph {
    /// Cause of a root that shares no tokens with the captured ones, and whose first `known` messages are
    /// those of an earlier conversation. `None` for the first root.
    pub(super) fn root_cause(
        &self,
        join: Join,
        messages: &[Message],
        known: usize,
        tools: &[ToolSpec],
    ) -> Option<BranchCause> {
        let first = self.nodes.first()?;
        if join != Join::Fork {
            let same =
                first.tools == tools && instructions(&first.messages).eq(instructions(messages));
            return Some(if same && self.quoted(messages) {
                BranchCause::Compaction
            } else if same {
                BranchCause::NewConversation
            } else {
                BranchCause::SubAgent
            });
        }
        let known_tools = self.states.root(keys::tools(tools)).is_some();
        Some(match self.known_turns.moved_up(messages) {
            Some(false) if known_tools => BranchCause::EditedHistory,
            Some(false) => BranchCause::ChangedTools,
            None if messages
                .get(known)
                .is_some_and(|m| m.role == Role::Assistant) =>
            {
                BranchCause::EditedHistory
            }
            _ => BranchCause::Compaction,
        })
    }

    /// Whether a message that is not the model's has a long line of one of its turns: a summary that it
    /// wrote.
    fn quoted(&self, messages: &[Message]) -> bool {
        let given = messages.iter().filter(|m| m.role != Role::Assistant);
        let given: Vec<_> = given.map(|m| m.content.text()).collect();
        let turns = self.nodes.iter().filter(|n| n.kind == TokenKind::Sampled);
        turns.flat_map(|node| &node.messages).any(|turn| {
            let text = turn.content.text();
            let mut lines = text.lines().map(str::trim);
            lines.any(|line| line.len() >= QUOTED_BYTES && given.iter().any(|g| g.contains(line)))
        })
    }

    /// Cause of a branch of a text or token prompt that continues `base`.
    pub(super) fn raw_cause(&self, base: Option<NodeId>) -> Option<BranchCause> {
        match base {
            None if self.nodes.is_empty() => None,
            None => Some(BranchCause::NewConversation),
            Some(node) if self.has_children(node) => Some(BranchCause::EarlierPoint),
            Some(_) => None,
        }
    }
}

/// The system messages at the start of a conversation.
fn instructions(messages: &[Message]) -> impl Iterator<Item = &Message> {
    messages.iter().take_while(|m| m.role == Role::System)
}
