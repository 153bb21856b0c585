//! The tables `judge`, `user` and `reward` of a recipe as settings of `sinew-judge`.
//!
//! Keys of servers are not part of a recipe: the caller that reads the environment passes them.

use crate::failure::Failure;
use sinew_judge::{
    AnswerFormat, Item, JudgeConfig, Limits, Mode, OpenAiConfig, Rubric, ServerConfig, UserConfig,
    View,
};
use sinew_recipe::{
    JudgeFormat, JudgeMode, JudgePlan, JudgeView, RewardServerPlan, RubricItem, RubricSource,
    UserPlan,
};
use std::time::Duration;

/// Settings of the judge `name`, such as `judge.quality`. A rubric in a file is read.
///
/// # Errors
/// If the file cannot be read, or holds no rubric.
pub(crate) fn judge_config(name: &str, plan: &JudgePlan) -> Result<JudgeConfig, Failure> {
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
fn rubric(judge: &str, source: Option<&RubricSource>) -> Result<Rubric, Failure> {
    let refused = |e: &dyn std::fmt::Display| Failure::input(format!("{judge}.rubric: {e}"));
    let rubric = match source {
        Some(RubricSource::File(path)) => {
            let text = std::fs::read_to_string(path);
            let text = text.map_err(|e| refused(&format_args!("{path:?}: {e}")))?;
            Rubric::from_markdown(&text)
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
    rubric.map_err(|e| refused(&e))
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

/// Settings of a simulated user.
pub(crate) fn user_config(plan: &UserPlan) -> UserConfig {
    UserConfig {
        retries: plan.retries,
        temperature: plan.temperature,
        max_tokens: plan.max_tokens,
        concurrency: plan.concurrency,
        limits: Limits {
            calls: plan.max_calls,
            tokens: plan.max_total_tokens,
            cost: plan.max_cost,
            price: plan.price.unwrap_or_default(),
        },
    }
}

/// Settings of a simulated user's server at `url`.
pub(crate) fn user_chat_config(plan: &UserPlan, url: &str, key: Option<String>) -> OpenAiConfig {
    OpenAiConfig {
        url: url.to_owned(),
        key,
        model: plan.model.clone().unwrap_or_default(),
        format: AnswerFormat::Text,
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
