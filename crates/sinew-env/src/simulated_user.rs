//! The port of a simulated user: a second model, or a script, that answers the policy in an environment.

use futures::future::BoxFuture;
use sinew_types::Message;

/// Reason why the user says nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UserError {
    /// The recipe has none.
    #[error("the recipe has no simulated user: add [user] with `model`, and `url` for a server")]
    Missing,
    /// It could not be asked, or did not answer.
    #[error("the simulated user does not answer: {0}")]
    Failed(String),
}

/// A simulated user. Many conversations are held at once.
pub trait SimulatedUser: Send + Sync {
    /// The next message of the user. In `messages` the user is the assistant, and the policy its user: they
    /// begin with the instructions, and end with what the policy said. Equal seeds sample equal answers,
    /// where the model takes seeds.
    fn say<'a>(
        &'a self,
        messages: &'a [Message],
        seed: u64,
    ) -> BoxFuture<'a, Result<String, UserError>>;
}
