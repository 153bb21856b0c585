//! The tables `judge` and `reward` of a recipe as settings of `sinew-judge`.
//!
//! Keys of servers are not part of a recipe: the caller that reads the environment passes them.

use sinew_judge::{
    AnswerFormat, Item, JudgeConfig, Limits, Mode, OpenAiConfig, Rubric, RubricError, ServerConfig,
    View,
};
use sinew_recipe::{
    JudgeFormat, JudgeMode, JudgePlan, JudgeView, RewardServerPlan, RubricItem, RubricSource,
};
use std::time::Duration;

/// Reasons for which a judge has no rubric.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RubricFault {
    #[error("{judge}.rubric: {path:?}: {error}")]
    File {
        judge: String,
        path: String,
        error: std::io::Error,
    },
    #[error("{judge}.rubric: {error}")]
    Rubric { judge: String, error: RubricError },
}

/// Settings of the judge `name`, such as `judge.quality`. A rubric in a file is read.
///
/// # Errors
/// If the file cannot be read, or holds no rubric.
pub(crate) fn judge_config(name: &str, plan: &JudgePlan) -> Result<JudgeConfig, RubricFault> {
    let [low, high] = plan.scale;
    Ok(JudgeConfig {
        name: name.to_owned(),
        rubric: rubric(name, plan.rubric.as_ref())?,
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

/// The rubric, read from its file if it has one.
fn rubric(judge: &str, source: Option<&RubricSource>) -> Result<Rubric, RubricFault> {
    let rubric = match source {
        Some(RubricSource::File(path)) => {
            let text = std::fs::read_to_string(path).map_err(|error| RubricFault::File {
                judge: judge.to_owned(),
                path: path.clone(),
                error,
            });
            Rubric::from_markdown(&text?)
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
    rubric.map_err(|error| RubricFault::Rubric {
        judge: judge.to_owned(),
        error,
    })
}

/// Settings of a judge's server at `url`.
pub(crate) fn chat_config(plan: &JudgePlan, url: &str, key: Option<String>) -> OpenAiConfig {
    OpenAiConfig {
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

/// Settings of a reward server.
pub(crate) fn reward_server_config(
    plan: &RewardServerPlan<'_>,
    key: Option<String>,
) -> ServerConfig {
    ServerConfig {
        name: plan.url.to_owned(),
        url: plan.url.to_owned(),
        key,
        batch: plan.batch,
        timeout: Duration::from_secs_f64(plan.timeout_s),
    }
}
