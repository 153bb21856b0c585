//! ScalingInter: the maximum number of turns grows in stages, so that a policy learns short solutions first.
//!
//! The maximum number of turns in training step `t` (from 0) is `rounds[min(floor(t / N), last)]`, with `N`
//! steps in a stage (AgentGym-RL, Xi et al. 2025, arXiv 2509.08755, and its scripts for ScalingInter-RL: 10,
//! 20, 30 turns with 100 steps each in `SciWorld`).

/// Stages of turns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnStages {
    /// Maximum turns of each stage.
    rounds: Vec<u32>,
    /// Steps of a stage.
    every: u64,
}

impl TurnStages {
    /// `None` without a stage, or if a stage has no steps.
    pub fn new(rounds: &[u32], every: u64) -> Option<Self> {
        let rounds = rounds.to_vec();
        (!rounds.is_empty() && every > 0).then_some(Self { rounds, every })
    }

    /// Maximum turns in a step, counted from 0.
    pub fn turns(&self, step: u64) -> u32 {
        let stage = usize::try_from(step / self.every).unwrap_or(usize::MAX);
        self.rounds[stage.min(self.rounds.len() - 1)]
    }
}
