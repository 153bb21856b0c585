//! Parts that a build may leave out, and what is reported where a recipe or a command needs one of them.
//!
//! The features are those of `crates/sinew/Cargo.toml`. A recipe that needs one is valid in every build, and
//! is refused with exit code 3: the recipe is right, the program is not the one for it.

use crate::failure::Failure;

/// The refusal of `what`, which needs a feature that this program was built without.
#[cfg_attr(
    feature = "full",
    expect(dead_code, reason = "a full build refuses nothing")
)]
pub(crate) fn missing(what: &str, feature: &str) -> Failure {
    Failure::outside(format!(
        "{what}: this program was built without the feature `{feature}`\n  \
         hint: cargo build -p sinew --features {feature} (all of them: --features full)"
    ))
}
