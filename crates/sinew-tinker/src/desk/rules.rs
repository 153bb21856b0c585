//! The base model of a desk, as checks of commands need it.

use super::residents::TrainerSupport;
use sinew_types::TokenId;

/// The base model behind all names.
#[derive(Clone, Debug)]
pub(super) struct BaseRules {
    /// Number of token ids.
    pub(super) vocab: usize,
    /// Longest sequence in tokens.
    pub(super) context: usize,
    /// Tokens that end a sequence.
    pub(super) stop_ids: Vec<TokenId>,
    /// Models that can be made.
    pub(super) support: TrainerSupport,
    /// Whether the engine takes adapters by name.
    pub(super) samples_adapters: bool,
    /// Whether there are engines for whole models.
    pub(super) samples_full: bool,
}
