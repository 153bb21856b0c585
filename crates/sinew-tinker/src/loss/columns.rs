//! Inputs of a datum as columns of the trainer's loss, checked by name.

use super::{HIGH, Kind, LOW, Loss};
use crate::error::TinkerError;
use crate::types::{Datum, Tensor, TensorValues};
use sinew_train::loss::{ClipBounds, RowInputs};
use sinew_train::pack::Target;

/// Sizes that a datum has to fit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Space {
    /// Tokens of the vocabulary.
    pub(crate) vocab: usize,
    /// Maximum targets of a datum.
    pub(crate) targets: usize,
}

/// Lowest and highest ratios by position.
type Bounds = (Vec<f32>, Vec<f32>);

/// Targets of a datum and the loss's columns, an entry for each target.
#[derive(Clone, Debug)]
pub(crate) struct Columns {
    /// Shape of the targets, `[N]` or `[N, K]`.
    pub(crate) shape: Vec<usize>,
    pub(crate) targets: Vec<Target>,
    weights: Vec<f32>,
    advantages: Vec<f32>,
    sampled: Vec<f32>,
    /// Lowest and highest ratios, if the loss has a clip.
    clip: Option<Bounds>,
    in_ratio: Option<Vec<bool>>,
    /// As many zeros as targets: no loss here has a term of the entropy.
    entropies: Vec<f32>,
}

impl Columns {
    /// The inputs of the trainer's loss, with the log-probabilities of the targets.
    pub(crate) fn inputs<'a>(&'a self, logprobs: &'a [f32]) -> RowInputs<'a> {
        RowInputs {
            weights: &self.weights,
            advantages: &self.advantages,
            behaviour: &self.sampled,
            prox: None,
            reference: None,
            logprobs,
            entropies: &self.entropies,
            clip: self
                .clip
                .as_ref()
                .map(|(low, high)| ClipBounds { low, high }),
            in_ratio: self.in_ratio.as_deref(),
        }
    }
}

/// The inputs of one datum, for errors with their paths.
struct Inputs<'a> {
    index: usize,
    datum: &'a Datum,
    /// Shape of every input: that of the targets.
    shape: &'a [usize],
}

impl Loss {
    /// Reads the inputs of the datum with this index.
    ///
    /// # Errors
    /// If an input is missing, unknown, of another shape or type, or has a value that is not allowed.
    pub(crate) fn columns(
        &self,
        index: usize,
        datum: &Datum,
        space: Space,
    ) -> Result<Columns, TinkerError> {
        let known = self.kind.inputs();
        if let Some(name) = datum.inputs.keys().find(|n| !known.contains(&n.as_str())) {
            return Err(TinkerError::value(
                format!("data[{index}].loss_fn_inputs"),
                format!("a tensor {name}"),
                format!("{} for {}", known.join(", "), self.name()),
            ));
        }
        let targets = self.targets(index, datum, space)?;
        let inputs = Inputs {
            index,
            datum,
            shape: &targets.0,
        };
        let n = targets.1.len();
        let (weights, advantages, sampled) = if self.kind == Kind::CrossEntropy {
            let weights = inputs.optional("weights")?;
            (
                weights.unwrap_or_else(|| vec![1.0; n]),
                vec![1.0; n],
                vec![0.0; n],
            )
        } else {
            let sampled = inputs.required("logprobs", self.name())?;
            let advantages = inputs.required("advantages", self.name())?;
            (vec![1.0; n], advantages, sampled)
        };
        let clip = self.clip(&inputs)?;
        let in_ratio = self.in_ratio(&inputs, &advantages)?;
        Ok(Columns {
            clip,
            in_ratio,
            shape: targets.0,
            targets: targets.1,
            weights,
            advantages,
            sampled,
            entropies: vec![0.0; n],
        })
    }

    /// Shape and tokens of the targets: position `i` of the input is followed by the targets in row `i`.
    fn targets(
        &self,
        index: usize,
        datum: &Datum,
        space: Space,
    ) -> Result<(Vec<usize>, Vec<Target>), TinkerError> {
        let field = format!("data[{index}].loss_fn_inputs.target_tokens");
        let Some(tensor) = datum.inputs.get("target_tokens") else {
            let hint = "the tokens whose log-probabilities are computed, one for each input token";
            return Err(TinkerError::missing(field, hint));
        };
        let (n, most) = (datum.tokens.len(), space.targets);
        let wide = self.kind == Kind::CrossEntropy;
        let k = match tensor.shape[..] {
            [rows] if rows == n => 1,
            [rows, k] if rows == n && k > 0 && wide => k,
            _ => {
                let shapes = if wide {
                    format!("[{n}], or [{n}, K] with K of 1 or more, for {n} input tokens")
                } else {
                    format!("[{n}] for {n} input tokens and {}", self.name())
                };
                return Err(TinkerError::value(
                    format!("{field}.shape"),
                    format!("{:?}", tensor.shape),
                    shapes,
                ));
            }
        };
        if tensor.len() > most {
            return Err(TinkerError::Limit {
                what: format!("the number of {field}"),
                value: tensor.len() as u64,
                limit: most as u64,
                hint: "send fewer targets for each position, or divide the datum".to_owned(),
            });
        }
        let TensorValues::I64(tokens) = &tensor.values else {
            return Err(TinkerError::value(
                format!("{field}.dtype"),
                tensor.values.dtype(),
                "int64",
            ));
        };
        let vocab = space.vocab;
        let target = |(at, &token): (usize, &i64)| match u32::try_from(token) {
            Ok(token) if (token as usize) < vocab => Ok(Target {
                after: (at / k) as u32,
                token,
            }),
            _ => Err(TinkerError::value(
                format!("{field}[{at}]"),
                token,
                format!(
                    "a token of the vocabulary, 0 to {}",
                    vocab.saturating_sub(1)
                ),
            )),
        };
        let targets = tokens.iter().enumerate().map(target);
        Ok((tensor.shape.clone(), targets.collect::<Result<_, _>>()?))
    }

    /// Bounds of the ratio by position: those of the datum, or of the configuration.
    fn clip(&self, inputs: &Inputs<'_>) -> Result<Option<Bounds>, TinkerError> {
        if !self.kind.is_clipped() {
            return Ok(None);
        }
        let low = self.threshold(inputs, LOW, self.low, self.kind.low())?;
        let high = self.threshold(inputs, HIGH, self.high, self.kind.high())?;
        let mut pairs = low.iter().zip(&high);
        if let Some(at) = pairs.position(|(&low, &high)| low < 0.0 || low > high) {
            return Err(TinkerError::value(
                inputs.field(&format!("{LOW}[{at}]")),
                low[at],
                format!("0 to {HIGH}[{at}] = {}", high[at]),
            ));
        }
        Ok(Some((low, high)))
    }

    fn threshold(
        &self,
        inputs: &Inputs<'_>,
        name: &str,
        configured: Option<f32>,
        default: Option<f32>,
    ) -> Result<Vec<f32>, TinkerError> {
        match (inputs.optional(name)?, configured.or(default)) {
            (Some(_), _) if configured.is_some() => Err(TinkerError::value(
                inputs.field(name),
                "a tensor",
                format!("either it or loss_fn_config.{name}, which is given, too"),
            )),
            (Some(by_position), _) => Ok(by_position),
            (None, Some(value)) => Ok(vec![value; inputs.shape.iter().product()]),
            (None, None) => Err(TinkerError::missing(
                format!("loss_fn_config.{name}"),
                format!(
                    "{} has no documented default of its clip; the ratio is one of a sequence's mean, for which \
                     Zheng et al. 2025 clip at 0.9997 and 1.0004",
                    self.name()
                ),
            )),
        }
    }

    /// Positions whose ratios the sequence's ratio is the mean of.
    fn in_ratio(
        &self,
        inputs: &Inputs<'_>,
        advantages: &[f32],
    ) -> Result<Option<Vec<bool>>, TinkerError> {
        if self.kind != Kind::Gspo {
            return Ok(None);
        }
        let name = "sequence_ratio_mask";
        let marks = inputs.required(name, self.name())?;
        let marks: Vec<bool> = marks.into_iter().map(|mark| mark != 0.0).collect();
        if !marks.contains(&true) && advantages.iter().any(|&a| a != 0.0) {
            return Err(TinkerError::value(
                inputs.field(name),
                "0 at all positions",
                "another number at the positions that were sampled: the ratio is the mean over them",
            ));
        }
        Ok(Some(marks))
    }
}

impl Inputs<'_> {
    /// Path of an input.
    fn field(&self, name: &str) -> String {
        format!("data[{}].loss_fn_inputs.{name}", self.index)
    }

    fn required(&self, name: &str, loss: &str) -> Result<Vec<f32>, TinkerError> {
        self.optional(name)?.ok_or_else(|| {
            let hint = format!("{loss} reads a number for each target");
            TinkerError::missing(self.field(name), hint)
        })
    }

    /// Numbers of an input, an entry for each target.
    fn optional(&self, name: &str) -> Result<Option<Vec<f32>>, TinkerError> {
        let tensor = self.datum.inputs.get(name);
        tensor.map(|tensor| self.numbers(name, tensor)).transpose()
    }

    fn numbers(&self, name: &str, tensor: &Tensor) -> Result<Vec<f32>, TinkerError> {
        if tensor.shape != self.shape {
            return Err(TinkerError::value(
                format!("{}.shape", self.field(name)),
                format!("{:?}", tensor.shape),
                format!("{:?}, the shape of target_tokens", self.shape),
            ));
        }
        let values: Vec<f32> = match &tensor.values {
            TensorValues::F32(values) => values.clone(),
            TensorValues::I64(values) => values.iter().map(|&v| v as f32).collect(),
        };
        match values.iter().position(|v| !v.is_finite()) {
            None => Ok(values),
            Some(at) => Err(TinkerError::value(
                self.field(&format!("{name}[{at}]")),
                values[at],
                "a finite number",
            )),
        }
    }
}
