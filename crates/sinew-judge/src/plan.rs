//! Turns the tables of a recipe into the settings of this crate.
//!
//! Keys of servers are not part of a recipe: the caller that reads the environment passes them.

use crate::frame::Mode;
use crate::judge::JudgeConfig;
use crate::ledger::Limits;
use crate::openai::{AnswerFormat, OpenAiConfig};
use crate::rubric::{Item, Rubric};
use crate::server::ServerConfig;
use crate::view::View;
use sinew_recipe::{
    JudgeFormat, JudgeMode, JudgePlan, JudgeView, RewardServerPlan, RubricItem, RubricSource,
};
use std::time::Duration;

impl JudgeConfig {
    /// Settings of the judge `name`, such as `judge.quality`. A rubric in a file is read.
    ///
    /// # Errors
    /// If the file cannot be read, or holds no rubric.
    pub fn of(name: &str, plan: &JudgePlan) -> Result<Self, String> {
        let [low, high] = plan.scale;
        Ok(Self {
            name: name.to_owned(),
            rubric: rubric(plan.rubric.as_ref()).map_err(|e| format!("{name}.rubric: {e}"))?,
            view: match plan.view {
                JudgeView::Last => View::Last,
                JudgeView::Dialogue => View::Dialogue,
                JudgeView::Calls => View::Calls,
            },
            columns: plan.columns.clone(),
            mode: match plan.mode {
                JudgeMode::Each => Mode::Each,
                JudgeMode::Scale => Mode::Scale { low, high },
                JudgeMode::Compare => Mode::Compare,
            },
            votes: plan.votes,
            retries: plan.retries,
            temperature: plan.temperature,
            max_tokens: plan.max_tokens,
            reasons: plan.reasons,
            concurrency: plan.concurrency,
            cache: plan.cache,
            limits: Limits {
                calls: plan.max_calls,
                tokens: plan.max_total_tokens,
                cost: plan.max_cost,
                price: plan.price.unwrap_or_default(),
            },
        })
    }
}

/// The rubric, read from its file if it has one.
fn rubric(source: Option<&RubricSource>) -> Result<Rubric, String> {
    let rubric = match source {
        Some(RubricSource::File(path)) => {
            let text = std::fs::read_to_string(path);
            Rubric::from_markdown(&text.map_err(|e| format!("{path:?}: {e}"))?)
        }
        Some(RubricSource::Items(items)) => {
            let parts = items.iter().map(RubricItem::parts);
            let item = |(text, weight): (&str, f64)| Item {
                text: text.to_owned(),
                weight,
            };
            Rubric::new(parts.map(item).collect())
        }
        None => Rubric::new(Vec::new()),
    };
    rubric.map_err(|e| e.to_string())
}

impl OpenAiConfig {
    /// Settings of a judge's server at `url`.
    pub fn of(plan: &JudgePlan, url: &str, key: Option<String>) -> Self {
        Self {
            url: url.to_owned(),
            key,
            model: plan.model.clone().unwrap_or_default(),
            format: match plan.format {
                JudgeFormat::JsonSchema => AnswerFormat::JsonSchema,
                JudgeFormat::JsonObject => AnswerFormat::JsonObject,
                JudgeFormat::Text => AnswerFormat::Text,
            },
            timeout: Duration::from_secs_f64(plan.timeout_s),
        }
    }
}

impl ServerConfig {
    /// Settings of a reward server.
    pub fn of(plan: &RewardServerPlan<'_>, key: Option<String>) -> Self {
        Self {
            name: plan.url.to_owned(),
            url: plan.url.to_owned(),
            key,
            batch: plan.batch,
            timeout: Duration::from_secs_f64(plan.timeout_s),
        }
    }
}
