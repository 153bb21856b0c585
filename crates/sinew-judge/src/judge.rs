//! A judge: its questions, votes, retries and budget, as a reward.

use crate::asking::{JudgeReply, Vote, VoteAction};
use crate::chat::{ChatAnswer, ChatModel, ChatRequest};
use crate::frame::{Frame, Mode};
use crate::ledger::{JudgeUsage, Ledger, Limits};
use crate::paid::{Budget, BudgetEnd, PaidModel, locked};
use crate::rubric::Rubric;
use crate::view::View;
use futures::FutureExt;
use futures::future::{BoxFuture, try_join_all};
use sinew_env::{Preference, Reward, RewardSample, Score, Unscored};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Mutex as AsyncMutex;

/// Settings of a judge.
#[derive(Clone, Debug)]
pub struct JudgeConfig {
    /// Name in recipes, metrics and reports, such as `judge.quality`.
    pub name: String,
    /// Items that it looks for.
    pub rubric: Rubric,
    /// Part of the episode that it sees.
    pub view: View,
    /// Columns of the task that it sees as well.
    pub columns: Vec<String>,
    /// Way in which it decides.
    pub mode: Mode,
    /// Number of independent verdicts, whose mean is the value. At least 1.
    pub votes: u32,
    /// Further questions of one vote after an outage or an answer that is not a verdict.
    pub retries: u32,
    /// Sampling temperature.
    pub temperature: f32,
    /// Maximum tokens of an answer.
    pub max_tokens: u32,
    /// Whether it gives reasons before it decides.
    pub reasons: bool,
    /// Maximum calls at once. At least 1.
    pub concurrency: usize,
    /// Whether an equal question is answered from the ledger.
    pub cache: bool,
    /// Limits of its calls, tokens and cost.
    pub limits: Limits,
}

/// Questions that are being asked, by key.
type InFlight = HashMap<String, Arc<AsyncMutex<()>>>;

/// A model that grades answers: a [`Preference`] with [`Mode::Compare`], and a [`Reward`] otherwise.
pub struct Judge {
    config: JudgeConfig,
    model: PaidModel,
    in_flight: Mutex<InFlight>,
}

sinew_types::debug_fields!(Judge, config);

impl Judge {
    /// Creates a judge. `ledger` has what it spent and decided before.
    pub fn new(
        config: JudgeConfig,
        model: Arc<dyn ChatModel>,
        ledger: Ledger,
        exhausted: BudgetEnd,
    ) -> Self {
        let budget = Budget {
            name: config.name.clone(),
            limits: config.limits,
            concurrency: config.concurrency,
            exhausted,
        };
        Self {
            model: PaidModel::new(model, ledger, budget),
            config,
            in_flight: Mutex::default(),
        }
    }

    pub fn config(&self) -> &JudgeConfig {
        &self.config
    }

    /// Calls and tokens so far.
    pub fn spent(&self) -> JudgeUsage {
        self.model.spent()
    }

    /// Values of the items for one sample, 0 to 1 each: means over the votes.
    ///
    /// # Errors
    /// If one of the votes gives no verdict.
    pub async fn items(&self, sample: &RewardSample) -> Result<Vec<f64>, Unscored> {
        if self.config.mode == Mode::Compare {
            let why = "mode = \"compare\" compares two answers of a group, and this is one answer";
            return Err(Unscored::new(why));
        }
        let data = self.config.view.of(sample, &self.config.columns)?;
        let (rubric, reasons) = (&self.config.rubric, self.config.reasons);
        let frame = Frame::single(rubric, self.config.mode, &data, reasons);
        let votes = (0..self.config.votes.max(1)).map(|vote| self.vote(&frame, vote));
        Ok(means(&try_join_all(votes).await?))
    }

    /// Share of votes that find `a` better than `b`, in this order. Equal answers are a tie that no model is
    /// asked about.
    async fn better(&self, a: &RewardSample, b: &RewardSample) -> Result<f64, Unscored> {
        let seen = [a, b].map(|s| self.config.view.of(s, &self.config.columns));
        let [a, b] = seen;
        let (a, b) = (a?, b?);
        if a == b {
            return Ok(0.5);
        }
        let frame = Frame::pair(&self.config.rubric, [&a, &b], self.config.reasons);
        let votes = (0..self.config.votes.max(1)).map(|vote| self.vote(&frame, vote));
        Ok(means(&try_join_all(votes).await?)[0])
    }

    /// One vote: from the ledger, or asked for.
    async fn vote(&self, frame: &Frame, vote: u32) -> Result<Vec<f64>, Unscored> {
        let key = self.key(frame, vote);
        if !self.config.cache {
            return self.asked(frame, vote, key).await;
        }
        // Equal questions at once, as of a group that gives one answer, are asked once.
        let lock = Arc::clone(locked(&self.in_flight).entry(key.clone()).or_default());
        let _first = lock.lock().await;
        let known = self.model.verdict(&key);
        let values = match known {
            Some(values) => Ok(values),
            None => self.asked(frame, vote, key.clone()).await,
        };
        let mut in_flight = locked(&self.in_flight);
        // The table and this call: no other call waits.
        if Arc::strong_count(&lock) <= 2 {
            in_flight.remove(&key);
        }
        values
    }

    /// Hash over everything that decides a verdict.
    fn key(&self, frame: &Frame, vote: u32) -> String {
        let mut hash = blake3::Hasher::new();
        hash.update(frame.hash().as_bytes());
        hash.update(&self.config.temperature.to_le_bytes());
        hash.update(&self.config.max_tokens.to_le_bytes());
        hash.update(&vote.to_le_bytes());
        hash.update(self.model.identity().as_bytes());
        hash.finalize().to_hex()[..32].to_owned()
    }

    /// Asks until there is a verdict, or none to expect.
    async fn asked(&self, frame: &Frame, vote: u32, key: String) -> Result<Vec<f64>, Unscored> {
        let mut asking = Vote::new(self.config.retries);
        let mut next = asking.first();
        loop {
            let (attempt, pause, refused) = match next {
                VoteAction::Done(values) => return Ok(values),
                VoteAction::Failed(why) => return Err(Unscored::new(why)),
                VoteAction::Ask {
                    attempt,
                    pause,
                    refused,
                } => (attempt, pause, refused),
            };
            if pause > Duration::ZERO {
                tokio::time::sleep(pause).await;
            }
            let request = ChatRequest {
                messages: frame.messages(refused.as_deref()),
                schema: Some(frame.schema()),
                temperature: self.config.temperature,
                max_tokens: self.config.max_tokens,
                seed: (u64::from(vote) << 32) | u64::from(attempt),
            };
            let heard = self.call(&request, frame, &key).await?;
            next = asking.on(heard);
        }
    }

    /// One call within the budget, booked in the ledger.
    async fn call(
        &self,
        request: &ChatRequest,
        frame: &Frame,
        key: &str,
    ) -> Result<JudgeReply<Vec<f64>>, Unscored> {
        let read = |answer: ChatAnswer| {
            let heard = self.heard(frame, &answer);
            let verdict = match &heard {
                JudgeReply::Verdict(values) => Some((key.to_owned(), values.clone())),
                _ => None,
            };
            (heard, verdict)
        };
        self.model.call(request, read).await.map_err(Unscored::new)
    }

    /// The verdict of an answer, or the reason why it is none. The reason of a cut answer is the limit.
    fn heard(&self, frame: &Frame, answer: &ChatAnswer) -> JudgeReply<Vec<f64>> {
        match frame.read(&answer.text) {
            Ok(values) => JudgeReply::Verdict(values),
            Err(_) if answer.cut => {
                let limit = self.config.max_tokens;
                JudgeReply::NoVerdict(format!("it was cut after max_tokens = {limit}"))
            }
            Err(why) => JudgeReply::NoVerdict(format!("no verdict: {why}")),
        }
    }

    /// The weighted mean of the items, with each of them as a part.
    fn score_of(&self, values: &[f64]) -> Result<Score, Unscored> {
        let named = values.iter().enumerate();
        let parts = named.map(|(i, v)| (format!("item_{}", i + 1), *v));
        Score::with_parts(self.config.rubric.mean(values), parts.collect())
    }
}

/// Means of equally long lists, place by place.
fn means(votes: &[Vec<f64>]) -> Vec<f64> {
    let len = votes.first().map_or(0, Vec::len);
    let mean = |i: usize| votes.iter().map(|v| v[i]).sum::<f64>() / votes.len() as f64;
    (0..len).map(mean).collect()
}

impl Reward for Judge {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn score<'a>(&'a self, sample: &'a RewardSample) -> BoxFuture<'a, Result<Score, Unscored>> {
        async { self.score_of(&self.items(sample).await?) }.boxed()
    }
}

impl Preference for Judge {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn prefer<'a>(
        &'a self,
        a: &'a RewardSample,
        b: &'a RewardSample,
    ) -> BoxFuture<'a, Result<f64, Unscored>> {
        self.better(a, b).boxed()
    }
}
