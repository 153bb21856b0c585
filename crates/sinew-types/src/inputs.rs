//! Inputs that some algorithms read from episodes and that not all episodes have.
//!
//! An algorithm states which [`EpisodeInput`]s it reads. Environments and agents state with [`Gives`] which
//! of them their episodes have. Comparing both before a run finds an algorithm that would learn from nothing.

/// Something about an episode, besides tokens and outcome, that some algorithms cannot do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EpisodeInput {
    /// Hashes of the states in which turns begin: [`Node::state_hash`](crate::Node::state_hash).
    States,
    /// Rewards of turns: [`Node::process_reward`](crate::Node::process_reward).
    TurnRewards,
    /// The metrics `tool_calls` and `tool_errors`, as numbers of calls.
    ToolCounts,
    /// The metric `format_penalty`, 0 to 1.
    FormatPenalty,
}

impl EpisodeInput {
    /// All inputs, in the order of the documentation.
    pub const ALL: [Self; 4] = [
        Self::States,
        Self::TurnRewards,
        Self::ToolCounts,
        Self::FormatPenalty,
    ];

    /// Name in messages and in the documentation.
    pub fn name(self) -> &'static str {
        match self {
            Self::States => "hashes of states",
            Self::TurnRewards => "rewards of turns",
            Self::ToolCounts => "counts of tool calls and of their errors",
            Self::FormatPenalty => "a format penalty",
        }
    }
}

/// Whether episodes have an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputPresence {
    /// All episodes have it.
    Yes,
    /// The author's class, server or agent decides. A class and a server may declare it when they start.
    Maybe,
    /// None of them has it. The text names a way out for its author or the recipe.
    No(&'static str),
}

impl InputPresence {
    /// The input of two sources together: both must have it.
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::No(fix), _) | (_, Self::No(fix)) => Self::No(fix),
            (Self::Maybe, _) | (_, Self::Maybe) => Self::Maybe,
            (Self::Yes, Self::Yes) => Self::Yes,
        }
    }
}

/// The inputs that the episodes of a source have: of an environment, an agent or stored data.
///
/// All fields are typed where one is made, so that a new input is a question to every source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gives {
    /// [`EpisodeInput::States`].
    pub states: InputPresence,
    /// [`EpisodeInput::TurnRewards`].
    pub turn_rewards: InputPresence,
    /// [`EpisodeInput::ToolCounts`].
    pub tool_counts: InputPresence,
    /// [`EpisodeInput::FormatPenalty`].
    pub format_penalty: InputPresence,
}

impl Gives {
    /// A source that decides everything itself.
    pub const MAYBE: Self = Self::all(InputPresence::Maybe);

    /// Returns the same answer for every input.
    pub const fn all(given: InputPresence) -> Self {
        Self {
            states: given,
            turn_rewards: given,
            tool_counts: given,
            format_penalty: given,
        }
    }

    /// Whether episodes have an input.
    pub fn of(&self, input: EpisodeInput) -> InputPresence {
        match input {
            EpisodeInput::States => self.states,
            EpisodeInput::TurnRewards => self.turn_rewards,
            EpisodeInput::ToolCounts => self.tool_counts,
            EpisodeInput::FormatPenalty => self.format_penalty,
        }
    }

    /// Combines two sources: the inputs that the episodes of both have.
    pub fn and(self, other: Self) -> Self {
        Self {
            states: self.states.and(other.states),
            turn_rewards: self.turn_rewards.and(other.turn_rewards),
            tool_counts: self.tool_counts.and(other.tool_counts),
            format_penalty: self.format_penalty.and(other.format_penalty),
        }
    }
}

/// Nothing.
impl Default for Gives {
    fn default() -> Self {
        Self::all(InputPresence::No("take an environment that has them"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_sources_have_what_both_have() {
        let none = Gives::default();
        let all = Gives::all(InputPresence::Yes);
        for input in EpisodeInput::ALL {
            assert_eq!(all.and(all).of(input), InputPresence::Yes);
            assert_eq!(all.and(Gives::MAYBE).of(input), InputPresence::Maybe);
            assert_eq!(Gives::MAYBE.and(none).of(input), none.of(input));
            assert!(!input.name().is_empty());
        }
        let states = Gives {
            states: InputPresence::Yes,
            ..none
        };
        assert_eq!(states.of(EpisodeInput::States), InputPresence::Yes);
        assert_eq!(states.of(EpisodeInput::TurnRewards), none.turn_rewards);
    }
}
