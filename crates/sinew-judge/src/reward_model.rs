//! Reward models: a scalar head on a decoder, in this process.
//!
//! The model has a separate thread and is loaded with the first sample. Samples that wait together are scored
//! in one pass, up to [`MAX_PASS`] tokens.

use crate::error::RewardModelError;
use futures::FutureExt;
use futures::future::BoxFuture;
use sinew_env::{Reward, RewardSample, Score, Unscored};
use sinew_model::{ModelFiles, Scorer, check_scorer};
use sinew_render::ChatRenderer;
use sinew_tensor::Cpu;
use sinew_types::{Message, TokenId};
use std::fmt;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// Maximum tokens of one pass with several samples.
const MAX_PASS: usize = 8192;
/// Maximum samples that wait; further ones wait for a place.
const MAX_WAITING: usize = 256;

/// Messages to the tokens that the model reads: the whole conversation in its own chat template.
pub type ToTokens = Arc<dyn Fn(&[Message]) -> Result<Vec<TokenId>, RewardModelError> + Send + Sync>;
/// Loads the model and the device that computes it.
pub type LoadScorer = Box<dyn FnOnce() -> Result<(Scorer, Cpu), RewardModelError> + Send>;

/// A sample on its way to the thread.
struct Job {
    tokens: Vec<TokenId>,
    answer: oneshot::Sender<Result<f32, Unscored>>,
}

/// A reward model as a reward. Its value is the output of the head at the last token, which has no
/// bounds: recipes clip it. The thread ends with the reward.
pub struct RewardModel {
    name: String,
    render: ToTokens,
    jobs: mpsc::Sender<Job>,
}

sinew_types::debug_fields!(RewardModel, name);

impl RewardModel {
    /// The reward model of a folder, computed by `dev`. Headers and tokenizer are read now, weights with
    /// the first sample.
    ///
    /// # Errors
    /// If the folder holds no reward model, or no chat template.
    pub fn open(name: String, files: ModelFiles, dev: Cpu) -> Result<Self, RewardModelError> {
        check_scorer(&files)?;
        let chat = match &files {
            ModelFiles::Dir(dir) | ModelFiles::Gguf(dir) => {
                ChatRenderer::from_dir(dir, serde_json::Map::new())
            }
        };
        let chat = chat?;
        let render = move |m: &[_]| chat.render_whole(m).map_err(RewardModelError::from);
        let load = move || Ok((Scorer::load(&files).map_err(RewardModelError::from)?, dev));
        Ok(Self::new(name, Arc::new(render), Box::new(load))?)
    }

    /// A model that `load` loads when the first sample comes.
    ///
    /// # Errors
    /// If the system has no thread for it.
    pub fn new(name: String, render: ToTokens, load: LoadScorer) -> std::io::Result<Self> {
        let (jobs, waiting) = mpsc::channel(MAX_WAITING);
        let thread = std::thread::Builder::new().name("reward-model".into());
        thread.spawn(move || serve(waiting, load))?;
        Ok(Self { name, render, jobs })
    }

    async fn value(&self, sample: &RewardSample) -> Result<f64, Unscored> {
        let tokens = (self.render)(&sample.messages).map_err(unscored)?;
        let (answer, value) = oneshot::channel();
        let ended = || Unscored::new("the reward model has ended");
        let job = Job { tokens, answer };
        self.jobs.send(job).await.map_err(|_| ended())?;
        let value = value.await.map_err(|_| ended())?;
        value.map(f64::from)
    }
}

/// Takes jobs until the last reward is gone. A model that cannot be loaded answers each with the reason.
fn serve(mut waiting: mpsc::Receiver<Job>, load: LoadScorer) {
    let Some(mut next) = waiting.blocking_recv() else {
        return;
    };
    let mut loaded = load();
    loop {
        let mut jobs = vec![next];
        let mut size = jobs[0].tokens.len();
        let mut over = None;
        while let Ok(job) = waiting.try_recv() {
            if size + job.tokens.len() > MAX_PASS {
                over = Some(job);
                break;
            }
            size += job.tokens.len();
            jobs.push(job);
        }
        score(&mut loaded, jobs);
        next = match over.or_else(|| waiting.blocking_recv()) {
            Some(job) => job,
            None => return,
        };
    }
}

fn unscored(why: impl fmt::Display) -> Unscored {
    Unscored::new(why.to_string())
}

/// One pass over the samples that the model can read; the others get the reason.
fn score(loaded: &mut Result<(Scorer, Cpu), RewardModelError>, jobs: Vec<Job>) {
    // Nobody waits for an answer whose episode was cancelled.
    let answer = |job: Job, value| drop(job.answer.send(value));
    let (scorer, dev) = match loaded {
        Ok(loaded) => (&mut loaded.0, &loaded.1),
        Err(why) => {
            let why: &RewardModelError = why;
            return jobs
                .into_iter()
                .for_each(|job| answer(job, Err(unscored(why))));
        }
    };
    let context = scorer.config().max_context;
    let fits = |job: &Job| (1..=context).contains(&job.tokens.len());
    let (jobs, others): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(fits);
    for job in others {
        let len = job.tokens.len();
        let why = format!("{len} tokens do not fit: the context of the reward model is {context}");
        answer(job, Err(Unscored::new(why)));
    }
    let sequences: Vec<Vec<TokenId>> = jobs.iter().map(|j| j.tokens.clone()).collect();
    match scorer.scores(dev, &sequences) {
        Ok(scores) => {
            let pairs = jobs.into_iter().zip(scores);
            pairs.for_each(|(job, score)| answer(job, Ok(score)));
        }
        Err(e) => jobs
            .into_iter()
            .for_each(|job| answer(job, Err(unscored(&e)))),
    }
}

impl Reward for RewardModel {
    fn name(&self) -> &str {
        &self.name
    }

    fn score<'a>(&'a self, sample: &'a RewardSample) -> BoxFuture<'a, Result<Score, Unscored>> {
        async { Score::new(self.value(sample).await?) }.boxed()
    }
}
