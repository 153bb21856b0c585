//! A simulated user: a model that says the next message of a conversation, within a budget.

use crate::asking::{JudgeReply, Vote, VoteAction};
use crate::chat::{ChatModel, ChatRequest};
use crate::ledger::{JudgeUsage, Ledger, Limits};
use crate::paid::{Budget, BudgetEnd, PaidModel};
use futures::FutureExt;
use futures::future::BoxFuture;
use sinew_env::{SimulatedUser, UserError};
use sinew_types::Message;
use std::sync::Arc;
use std::time::Duration;

/// Settings of a simulated user.
#[derive(Clone, Debug)]
pub struct UserConfig {
    /// Further questions after an outage.
    pub retries: u32,
    /// Sampling temperature.
    pub temperature: f32,
    /// Maximum tokens of a message.
    pub max_tokens: u32,
    /// Maximum questions at once. At least 1.
    pub concurrency: usize,
    /// Limits of its calls, tokens and cost.
    pub limits: Limits,
}

/// A model that plays the user.
pub struct ModelUser {
    config: UserConfig,
    model: PaidModel,
}

sinew_types::debug_fields!(ModelUser, config);

impl ModelUser {
    /// Creates a user. `ledger` has what it spent before.
    pub fn new(
        config: UserConfig,
        model: Arc<dyn ChatModel>,
        ledger: Ledger,
        exhausted: BudgetEnd,
    ) -> Self {
        let budget = Budget {
            name: "user".to_owned(),
            limits: config.limits,
            concurrency: config.concurrency,
            exhausted,
        };
        Self {
            model: PaidModel::new(model, ledger, budget),
            config,
        }
    }

    /// Calls and tokens so far.
    pub fn spent(&self) -> JudgeUsage {
        self.model.spent()
    }

    /// Asks until there is a message, or none to expect.
    async fn asked(&self, messages: &[Message], seed: u64) -> Result<String, UserError> {
        let mut asking = Vote::new(self.config.retries);
        let mut next = asking.first();
        loop {
            let (attempt, pause) = match next {
                VoteAction::Done(text) => return Ok(text),
                VoteAction::Failed(why) => return Err(UserError::Failed(why)),
                VoteAction::Ask { attempt, pause, .. } => (attempt, pause),
            };
            if pause > Duration::ZERO {
                tokio::time::sleep(pause).await;
            }
            let request = ChatRequest {
                messages: messages.to_vec(),
                schema: None,
                temperature: self.config.temperature,
                max_tokens: self.config.max_tokens,
                seed: seed.wrapping_add(u64::from(attempt)),
            };
            let said = self.model.call(&request, |answer| {
                let text = answer.text.trim().to_owned();
                let said = if text.is_empty() {
                    JudgeReply::NoVerdict("the answer has no text".to_owned())
                } else {
                    JudgeReply::Verdict(text)
                };
                (said, None)
            });
            next = asking.on(said.await.map_err(UserError::Failed)?);
        }
    }
}

impl SimulatedUser for ModelUser {
    fn say<'a>(
        &'a self,
        messages: &'a [Message],
        seed: u64,
    ) -> BoxFuture<'a, Result<String, UserError>> {
        self.asked(messages, seed).boxed()
    }
}
