//! Branches of a trace by their cause, and the treatment of earlier thinking, which causes some of them.

use serde::{Deserialize, Serialize};

/// Cause of a branch of a trace. Without one, an episode is one path, which is one training sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BranchCause {
    /// Earlier messages were removed or replaced by a summary.
    Compaction,
    /// Another conversation of the same episode, with other instructions or tools.
    SubAgent,
    /// Another conversation of the same episode, with the same instructions and tools.
    NewConversation,
    /// The chat template left the thinking of earlier turns out of a later prompt.
    DroppedThinking,
    /// The chat template rewrote earlier messages otherwise: it moved tools or instructions.
    TemplateRewrite,
    /// Earlier messages have other words, or words in place of a turn were not sampled.
    EditedHistory,
    /// The same messages with other tools.
    ChangedTools,
    /// The conversation continued from an earlier point, with its later messages left out.
    EarlierPoint,
    /// The same prompt was sampled more than once.
    Resample,
}

impl BranchCause {
    /// Every cause, in order.
    pub const ALL: [Self; 9] = [
        Self::Compaction,
        Self::SubAgent,
        Self::NewConversation,
        Self::DroppedThinking,
        Self::TemplateRewrite,
        Self::EditedHistory,
        Self::ChangedTools,
        Self::EarlierPoint,
        Self::Resample,
    ];

    /// Name in traces and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compaction => "compaction",
            Self::SubAgent => "sub_agent",
            Self::NewConversation => "new_conversation",
            Self::DroppedThinking => "dropped_thinking",
            Self::TemplateRewrite => "template_rewrite",
            Self::EditedHistory => "edited_history",
            Self::ChangedTools => "changed_tools",
            Self::EarlierPoint => "earlier_point",
            Self::Resample => "resample",
        }
    }
}

/// Treatment of the thinking of earlier turns in the contexts that the model samples from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Thinking {
    /// Contexts hold every sampled token, whatever the client or the chat template leaves out.
    #[default]
    Kept,
    /// Contexts are what a server renders by the chat template. A turn behind thinking that was left out has
    /// a context of its own.
    Dropped,
}

impl Thinking {
    /// Name in recipes and requests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kept => "kept",
            Self::Dropped => "dropped",
        }
    }
}

impl std::str::FromStr for Thinking {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "kept" => Ok(Self::Kept),
            "dropped" => Ok(Self::Dropped),
            other => Err(format!("{other:?}: allowed: kept, dropped")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_serialized_forms() {
        for cause in BranchCause::ALL {
            assert_eq!(serde_json::to_value(cause).unwrap(), cause.name());
        }
        for thinking in [Thinking::Kept, Thinking::Dropped] {
            assert_eq!(serde_json::to_value(thinking).unwrap(), thinking.name());
            assert_eq!(thinking.name().parse(), Ok(thinking));
        }
        assert!("gone".parse::<Thinking>().is_err());
    }
}
