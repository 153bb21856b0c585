//! Low-rank adapters (LoRA, Hu et al. 2021): `y = x Wᵀ + (alpha / rank) (x Aᵀ) Bᵀ` with W frozen.
//!
//! Names and files are those of PEFT, so that adapters load there and its adapters load here. One
//! rank and one alpha for all adapters, no dropout; rsLoRA, DoRA and rank patterns are refused.
//!
//! There are two ways to compute them, which differ by rounding. **Merged**: adapters become part of the
//! weights before a product, `W + (alpha / rank) B A` in f32, as in an engine with merged weights. **Added**:
//! the products of the adapters are added to those of the weights, as in an engine with several adapters
//! ([`crate::InferBatch::adapters`]). Training does either, and has the bits of the engine that does the same
//! ([`crate::TrainModel::adding_adapters`]).

mod files;
mod merge;

pub use merge::{MergeError, merge_lora};

use crate::config::ModelConfig;
use crate::error::LoraError;
use crate::params::{ParamEntry, Random, TensorMismatch, TensorTable};
use serde_json::json;
use sinew_tensor::Buffer;
use sinew_types::{TensorSource, TensorView};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// A linear layer that can carry an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Projection {
    /// `[q, d]`, in attention.
    Q,
    /// `[kv, d]`
    K,
    /// `[kv, d]`
    V,
    /// `[d, q]`, after attention.
    O,
    /// `[ff, d]`
    Gate,
    /// `[ff, d]`
    Up,
    /// `[d, ff]`
    Down,
    /// `[vocab, d]`: the output projection. With tied embeddings, they stay as they are.
    Head,
}

impl Projection {
    /// All projections, in the order of the layout: those of the layers, then the output projection.
    pub const ALL: [Self; 8] = [
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::Gate,
        Self::Up,
        Self::Down,
        Self::Head,
    ];

    /// The projections of the layers.
    pub const LAYERS: [Self; 7] = [
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    /// Name of the module, as in `target_modules` of PEFT.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q => "q_proj",
            Self::K => "k_proj",
            Self::V => "v_proj",
            Self::O => "o_proj",
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
            Self::Head => "lm_head",
        }
    }

    /// The projection of a module's name.
    ///
    /// # Errors
    /// If it is none of [`Projection::ALL`]; the message lists them.
    pub fn parse(name: &str) -> Result<Self, LoraError> {
        let found = Self::ALL
            .into_iter()
            .find(|projection| projection.name() == name);
        found.ok_or_else(|| LoraError::Target(name.to_owned()))
    }

    /// Full name of its module in `layer`, as in tensor names; the output projection has no layer.
    fn module(self, layer: usize) -> String {
        let block = match self {
            Self::Q | Self::K | Self::V | Self::O => "self_attn",
            Self::Gate | Self::Up | Self::Down => "mlp",
            Self::Head => return self.name().to_owned(),
        };
        format!("model.layers.{layer}.{block}.{}", self.name())
    }

    /// Input and output width.
    fn widths(self, c: &ModelConfig) -> (usize, usize) {
        match self {
            Self::Q => (c.d_model, c.q_dim()),
            Self::K | Self::V => (c.d_model, c.kv_dim()),
            Self::O => (c.q_dim(), c.d_model),
            Self::Gate | Self::Up => (c.d_model, c.d_ff),
            Self::Down => (c.d_ff, c.d_model),
            Self::Head => (c.d_model, c.vocab),
        }
    }
}

/// Projections that share their input and whose outputs lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Group {
    Qkv,
    O,
    GateUp,
    Down,
}

impl Group {
    const ALL: [Self; 4] = [Self::Qkv, Self::O, Self::GateUp, Self::Down];

    fn projections(self) -> &'static [Projection] {
        match self {
            Self::Qkv => &[Projection::Q, Projection::K, Projection::V],
            Self::O => &[Projection::O],
            Self::GateUp => &[Projection::Gate, Projection::Up],
            Self::Down => &[Projection::Down],
        }
    }
}

/// Size, scale and targets of the adapters: the same for all layers.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Inner width, 1 to 1024. An adapter of `[out, in]` has `rank (in + out)` values.
    pub rank: usize,
    /// The adapter's output is scaled by `alpha / rank`.
    pub alpha: f32,
    /// Projections that have adapters, each at most once, in any order.
    pub targets: Vec<Projection>,
}

impl LoraConfig {
    /// Refuses a rank, alpha or targets that cannot be computed.
    pub fn validate(&self) -> Result<(), LoraError> {
        if !(1..=1024).contains(&self.rank) {
            return Err(LoraError::Rank(self.rank));
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            return Err(LoraError::Alpha(self.alpha));
        }
        if self.targets.is_empty() {
            return Err(LoraError::NoTarget);
        }
        let mut sorted = self.targets.clone();
        sorted.sort_unstable();
        match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(LoraError::Twice(pair[0].name())),
            None => Ok(()),
        }
    }

    /// Factor of the product of both matrices: `alpha / rank`.
    fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }

    /// The decoder `model` with merged adapters: an adapted output projection is not tied to the embeddings.
    pub fn merged_config(&self, model: &ModelConfig) -> ModelConfig {
        let mut merged = model.clone();
        merged.tied_embeddings &= !self.targets.contains(&Projection::Head);
        merged
    }

    /// `adapter_config.json` of PEFT; `base_model` is the name or path it records.
    pub fn to_json(&self, base_model: &str) -> String {
        let targets: Vec<_> = self.targets.iter().map(|target| target.name()).collect();
        let value = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "target_modules": targets,
        });
        format!("{value:#}")
    }

    /// Reads an `adapter_config.json`.
    ///
    /// # Errors
    /// If a field is missing, or asks for a variant that is not computed here.
    pub fn from_json(text: &str) -> Result<Self, LoraError> {
        let bad = |text: String| LoraError::Config(text);
        let value: serde_json::Value =
            serde_json::from_str(text).map_err(|error| bad(error.to_string()))?;
        for field in ["use_rslora", "use_dora", "fan_in_fan_out"] {
            if value[field] == true {
                return Err(bad(format!("`{field}` is not supported")));
            }
        }
        for field in ["rank_pattern", "alpha_pattern"] {
            if value[field].as_object().is_some_and(|map| !map.is_empty()) {
                return Err(bad(format!("`{field}` is not supported: one rank for all")));
            }
        }
        let rank = value["r"]
            .as_u64()
            .ok_or_else(|| bad("`r` is no number".to_owned()))?;
        let alpha = value["lora_alpha"].as_f64();
        let names = value["target_modules"].as_array();
        let names = names.ok_or_else(|| bad("`target_modules` is no list".to_owned()))?;
        let mut targets = names
            .iter()
            .map(|name| Projection::parse(name.as_str().unwrap_or_default()))
            .collect::<Result<Vec<_>, _>>()?;
        targets.sort_unstable();
        let config = Self {
            rank: rank as usize,
            alpha: alpha.ok_or_else(|| bad("`lora_alpha` is no number".to_owned()))? as f32,
            targets,
        };
        config.validate()?;
        Ok(config)
    }
}

/// Places of the adapters of one group in one layer.
#[derive(Clone, Debug)]
pub(crate) struct GroupPlaces {
    /// The A of all its adapters, one below the other: `[adapters · rank, in]`.
    pub(crate) a: Range<usize>,
    /// Parts in the order of the group's outputs; projections without an adapter are left out.
    pub(crate) parts: Vec<PartPlace>,
}

/// Place of one adapter's B `[width, rank]`.
#[derive(Clone, Debug)]
pub(crate) struct PartPlace {
    /// The adapted projection.
    projection: Projection,
    pub(crate) b: Range<usize>,
    /// First of the group's output columns that it adds to, and their number.
    pub(crate) column: usize,
    pub(crate) width: usize,
}

/// Layout of the adapters' tensors in their flat buffer: by layer and group, all A of a group side by side,
/// then each B. The output projection comes last.
#[derive(Clone, Debug)]
pub struct LoraLayout {
    table: TensorTable,
    groups: HashMap<(usize, Group), GroupPlaces>,
    head: Option<GroupPlaces>,
}

impl LoraLayout {
    fn new(config: &LoraConfig, model: &ModelConfig) -> Self {
        let (mut table, mut groups) = (TensorTable::default(), HashMap::new());
        for layer in 0..model.layers {
            for group in Group::ALL {
                let projections = group.projections();
                if let Some(places) = place(&mut table, config, model, layer, projections) {
                    groups.insert((layer, group), places);
                }
            }
        }
        let head = place(&mut table, config, model, 0, &[Projection::Head]);
        Self {
            table,
            groups,
            head,
        }
    }

    /// Places of the adapters of `group` in `layer`, if it has some.
    pub(crate) fn group(&self, layer: usize, group: Group) -> Option<&GroupPlaces> {
        self.groups.get(&(layer, group))
    }

    /// Place of the output projection's adapter, if it has one.
    pub(crate) fn head(&self) -> Option<&GroupPlaces> {
        self.head.as_ref()
    }

    /// The tensors by their PEFT names.
    pub fn table(&self) -> &TensorTable {
        &self.table
    }
}

/// Adds the adapters of projections whose outputs lie side by side, if they are targets.
fn place(
    table: &mut TensorTable,
    config: &LoraConfig,
    model: &ModelConfig,
    layer: usize,
    projections: &[Projection],
) -> Option<GroupPlaces> {
    let rank = config.rank;
    let is_target = |projection: &Projection| config.targets.contains(projection);
    if !projections.iter().any(is_target) {
        return None;
    }
    let targets = projections.iter().filter(|&p| is_target(p));
    let a =
        table.group(targets.map(|&p| (tensor_name(p, layer, "A"), vec![rank, p.widths(model).0])));
    let (mut column, mut parts) = (0, Vec::new());
    for &projection in projections {
        let width = projection.widths(model).1;
        if is_target(&projection) {
            let name = tensor_name(projection, layer, "B");
            parts.push(PartPlace {
                projection,
                b: table.group([(name, vec![width, rank])]),
                column,
                width,
            });
        }
        column += width;
    }
    Some(GroupPlaces { a, parts })
}

/// Name of a tensor as PEFT writes it; `part` is `A` or `B`.
fn tensor_name(projection: Projection, layer: usize, part: &str) -> String {
    let module = projection.module(layer);
    format!("base_model.model.{module}.lora_{part}.weight")
}

/// Adapters of a decoder, in one flat buffer. Gradients and optimizer states have the same layout.
#[derive(Clone, Debug)]
pub struct Lora {
    config: LoraConfig,
    model: ModelConfig,
    layout: Arc<LoraLayout>,
    values: Buffer,
}

impl Lora {
    /// Fresh adapters: A uniform within `1 / sqrt(in)` (as PEFT starts), B zero, so that the model
    /// is unchanged. The same seed gives the same values on every machine.
    ///
    /// # Errors
    /// If `config` is not valid.
    pub fn random(config: &LoraConfig, model: &ModelConfig, seed: u64) -> Result<Self, LoraError> {
        let mut lora = Self::zeros(config, model)?;
        for (i, (entry, values)) in lora.tensors_mut().into_iter().enumerate() {
            if entry.name.ends_with("lora_A.weight") {
                let bound = 1.0 / (entry.shape[1] as f32).sqrt();
                Random::new(seed, i as u64).fill_uniform(values, bound);
            }
        }
        Ok(lora)
    }

    fn zeros(config: &LoraConfig, model: &ModelConfig) -> Result<Self, LoraError> {
        config.validate()?;
        let layout = Arc::new(LoraLayout::new(config, model));
        let values = Buffer::zeros(layout.table.total());
        Ok(Self {
            config: config.clone(),
            model: model.clone(),
            layout,
            values,
        })
    }

    /// Overwrites all adapters with those of `source`; on `Err` nothing changed.
    pub fn copy_from(&mut self, source: &dyn TensorSource) -> Result<(), TensorMismatch> {
        self.layout.table.copy(source, &mut self.values)
    }

    /// Rank, scale and targets.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Layout of the tensors.
    pub fn layout(&self) -> &Arc<LoraLayout> {
        &self.layout
    }

    /// Shape of the decoder that these adapters apply to.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// All values, padding included.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// All values for an update in place. Padding must stay 0.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Every tensor with its values.
    pub fn tensors_mut(&mut self) -> Vec<(&ParamEntry, &mut [f32])> {
        self.layout.table.split_mut(&mut self.values)
    }

    /// `alpha / rank`
    pub(crate) fn scale(&self) -> f32 {
        self.config.scale()
    }
}

impl TensorSource for Lora {
    fn names(&self) -> Vec<String> {
        self.layout.table.names()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.layout.table.view(name, &self.values)
    }
}
