//! The lineage of the weights that a session of a run publishes.

use crate::failure::Failure;
use sinew_recipe::RunPlan;
use sinew_runs::RunDir;
use sinew_types::Lineage;

/// Numbers that distinguish the session of a run from its other sessions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionOrigin {
    /// Number that each session takes from the store at its start, larger than all before it.
    pub(crate) fence: u64,
    /// Step of the checkpoint that it resumes from; 0: none.
    pub(crate) step: u64,
}

/// The lineage of a session. Trainers that repeat their bits have one for each recipe, so that a resumed run
/// continues it. PyTorch on a GPU and Tinker services do not: a version that they compute again has other
/// bits than the one that sampled, and each session has its own lineage.
///
/// # Errors
/// If the recipe cannot be written as text.
pub(crate) fn of_session(
    recipe: &RunPlan,
    dir: &RunDir,
    origin: SessionOrigin,
) -> Result<Lineage, Failure> {
    let hash = dir.portable(recipe).hash().map_err(Failure::system)?;
    let torch = recipe.torch();
    let repeats = recipe.tinker().is_none() && torch.is_none_or(|trainer| trainer.deterministic);
    Ok(lineage(&hash, (!repeats).then_some(origin)))
}

/// The first 8 hexadecimal digits of a BLAKE3 hash.
fn lineage(config_hash: &str, origin: Option<SessionOrigin>) -> Lineage {
    let mut hasher = blake3::Hasher::new();
    hasher.update(config_hash.as_bytes());
    if let Some(SessionOrigin { fence, step }) = origin {
        hasher.update(&fence.to_le_bytes());
        hasher.update(&step.to_le_bytes());
    }
    let [a, b, c, d, ..] = *hasher.finalize().as_bytes();
    Lineage(u32::from_be_bytes([a, b, c, d]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_differ_only_where_bits_are_not_repeated() {
        let digits = blake3::hash(b"abc").to_hex().to_string();
        assert_eq!(lineage("abc", None).to_string(), &digits[..8]);
        assert_ne!(lineage("abc", None), lineage("abd", None));
        let session = |fence, step| lineage("abc", Some(SessionOrigin { fence, step }));
        assert_eq!(session(1, 10), session(1, 10));
        let all = [session(0, 0), session(1, 0), session(0, 1), session(1, 1)];
        for (at, one) in all.iter().enumerate() {
            assert!(!all[at + 1..].contains(one));
            assert_ne!(*one, lineage("abc", None));
        }
    }
}
