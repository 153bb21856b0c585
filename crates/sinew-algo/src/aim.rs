//! A dial of difficulty that aims at a success rate, by default one half.
//!
//! The types of an environment are its levels, from the easiest. The dial is a position among them; a
//! position between two levels draws both in proportion. Each step moves the position by `gain x (success -
//! target)`, where `success` is that of the step's episodes at these levels. This is the stochastic
//! approximation of Robbins and Monro (1951) with a constant step, known as a weighted staircase in
//! psychophysics (Kaernbach 1991). It rests where the policy succeeds as often as the target asks. Success of
//! one half has the largest variance, and with it the largest gradient of a group-relative objective.

use crate::AdaptiveConfig;
use serde::{Deserialize, Serialize};

/// A position among levels, 0 for the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Dial(f64);

impl Dial {
    /// Returns the level at or below the position, the level above it, and the share of the latter.
    fn between(self, levels: usize) -> (usize, usize, f64) {
        let last = levels.saturating_sub(1);
        let at = self.0.clamp(0.0, last as f64);
        let below = at.floor() as usize;
        (below, (below + 1).min(last), at - at.floor())
    }

    /// Whether the dial's position is at or next to a level.
    pub fn aims_at(self, level: usize, levels: usize) -> bool {
        let (below, above, share) = self.between(levels);
        level == below || (level == above && share > 0.0)
    }

    /// Probabilities of the levels; they sum to 1. A share of all draws is uniform.
    pub fn probabilities(self, config: &AdaptiveConfig, levels: usize) -> Vec<f64> {
        let (below, above, share) = self.between(levels);
        let uniform = config.floor / levels as f64;
        let mut all = vec![uniform; levels];
        if let Some(p) = all.get_mut(below) {
            *p += (1.0 - config.floor) * (1.0 - share);
        }
        if let Some(p) = all.get_mut(above) {
            *p += (1.0 - config.floor) * share;
        }
        all
    }

    /// Moves by the success rate of a step's episodes at the levels that the dial aims at.
    pub fn turn(&mut self, config: &AdaptiveConfig, success: f64, levels: usize) {
        let last = levels.saturating_sub(1) as f64;
        self.0 = (self.0 + config.gain * (success - config.target)).clamp(0.0, last);
    }
}
