//! A model whose calls are paid for: bounded at once and over a run, and booked in a ledger.

use crate::asking::JudgeReply;
use crate::chat::{ChatAnswer, ChatError, ChatModel, ChatRequest, Usage};
use crate::ledger::{JudgeUsage, Ledger, Limits};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Semaphore;

/// Treatment of a question when there is nothing left to spend.
#[derive(Clone)]
pub enum BudgetEnd {
    /// It has no answer, with the reason, for commands that only measure.
    Unscored,
    /// The function is called with the reason and must end the run. The question waits for that end, so that
    /// its sample is neither scored nor lost: a resumed run asks again.
    Stop(Arc<dyn Fn(&str) + Send + Sync>),
}

impl fmt::Debug for BudgetEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unscored => "Unscored",
            Self::Stop(_) => "Stop",
        })
    }
}

/// Bounds of a model's calls.
pub(crate) struct Budget {
    /// Name in messages, such as `judge.quality`.
    pub(crate) name: String,
    /// Limits over a whole run.
    pub(crate) limits: Limits,
    /// Maximum calls at once. At least 1.
    pub(crate) concurrency: usize,
    /// Treatment of a spent budget.
    pub(crate) exhausted: BudgetEnd,
}

/// A model with its budget.
pub(crate) struct PaidModel {
    model: Arc<dyn ChatModel>,
    ledger: Mutex<Ledger>,
    slots: Semaphore,
    budget: Budget,
}

/// A lock that a panic elsewhere does not take away: what it holds stays valid at every step.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PaidModel {
    /// A model; `ledger` has what it spent before.
    pub(crate) fn new(model: Arc<dyn ChatModel>, ledger: Ledger, budget: Budget) -> Self {
        Self {
            model,
            ledger: Mutex::new(ledger),
            slots: Semaphore::new(budget.concurrency.max(1)),
            budget,
        }
    }

    /// Identity of the model.
    pub(crate) fn identity(&self) -> String {
        self.model.identity()
    }

    /// Calls and tokens so far.
    pub(crate) fn spent(&self) -> JudgeUsage {
        locked(&self.ledger).spent()
    }

    /// The verdict with this key.
    pub(crate) fn verdict(&self, key: &str) -> Option<Vec<f64>> {
        locked(&self.ledger).verdict(key).map(<[f64]>::to_vec)
    }

    /// One call within the budget, booked with the verdict that `read` finds in the answer.
    ///
    /// # Errors
    /// The reason, if the budget is spent or the ledger cannot be written.
    pub(crate) async fn call<V>(
        &self,
        request: &ChatRequest,
        read: impl FnOnce(ChatAnswer) -> (JudgeReply<V>, Option<(String, Vec<f64>)>),
    ) -> Result<JudgeReply<V>, String> {
        let slot = self.slots.acquire().await.map_err(|e| e.to_string())?;
        self.check_budget().await?;
        let call = Call::begin(&self.ledger, request);
        let answer = self.model.ask(request).await;
        drop(slot);
        let (heard, usage, verdict) = match answer {
            Err(ChatError::Passing(why)) => (JudgeReply::Passing(why), Usage::default(), None),
            Err(ChatError::Unheard(why)) => (JudgeReply::Passing(why), call.at_most, None),
            Err(ChatError::Lasting(why)) => (JudgeReply::Lasting(why), Usage::default(), None),
            Ok(answer) => {
                let uncounted = Usage {
                    output: answer.text.len() as u64,
                    ..call.at_most
                };
                let usage = answer.usage.unwrap_or(uncounted);
                let (heard, verdict) = read(answer);
                (heard, usage, verdict)
            }
        };
        let booked = call.end(usage, verdict);
        booked.map_err(|e| format!("the ledger of {}: {e}", self.budget.name))?;
        Ok(heard)
    }

    /// Goes on only while there is something left to spend.
    async fn check_budget(&self) -> Result<(), String> {
        let reached = self.budget.limits.reached(&self.spent());
        let Some(why) = reached else { return Ok(()) };
        let why = format!("{}: the budget is spent: {why}", self.budget.name);
        match &self.budget.exhausted {
            BudgetEnd::Unscored => Err(why),
            BudgetEnd::Stop(stop) => {
                stop(&why);
                std::future::pending().await
            }
        }
    }
}

/// A call that is under way. If its caller is gone, as when its episode ends, it is booked with
/// what it may cost: the model may have answered.
struct Call<'a> {
    ledger: &'a Mutex<Ledger>,
    /// Maximum tokens, where the server counts none: a token has at least one byte.
    at_most: Usage,
    ended: bool,
}

impl<'a> Call<'a> {
    fn begin(ledger: &'a Mutex<Ledger>, request: &ChatRequest) -> Self {
        let bytes = request.messages.iter().map(|m| m.content.text_len() as u64);
        Self {
            ledger,
            at_most: Usage {
                input: bytes.sum(),
                output: u64::from(request.max_tokens),
            },
            ended: false,
        }
    }

    /// Books what it cost.
    fn end(mut self, usage: Usage, verdict: Option<(String, Vec<f64>)>) -> io::Result<()> {
        self.ended = true;
        locked(self.ledger).book(usage, verdict)
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // It counts even if the file cannot be written, and no sample is left to report to.
            let _ = locked(self.ledger).book(self.at_most, None);
        }
    }
}
