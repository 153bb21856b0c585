//! Training: log-probabilities of chosen tokens and their gradients, over packed sequences that
//! share prefixes.
//!
//! One step is `forward` (hidden states of all rows), `logprobs` (the output projection, only for the asked
//! rows), `backward` (gradients added up in the layout of the weights, or of the adapters when there are
//! some). All memory lives in [`Activations`] and [`Grads`] and is reused; weights are used as they are, so
//! that nothing has to be prepared after an optimizer step.
//!
//! Rows are tokens of a tree: a row attends to its ancestors, so a prefix that several samples share is
//! computed once. A row's result depends only on its ancestors.

mod activations;
mod backward;
mod forward;
mod linear;
mod top;
mod value;

pub use activations::{Activations, Keep};
pub use backward::OutputGrads;
pub use forward::Logprobs;
pub use value::{ValueGrads, ValueHead};

use crate::config::{ConfigError, ModelConfig};
use crate::decoder::{Decoder, ForwardError};
use crate::lora::{Lora, LoraLayout};
use crate::params::{ParamLayout, Params};
use sinew_tensor::logprob::LowRank;
use sinew_tensor::{Buffer, Cpu};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// A decoder that is trained; holds no weights and no state of a pass.
#[derive(Debug)]
pub struct TrainModel {
    decoder: Decoder,
    /// Whether adapters are merged into weights before each product, or their products are added.
    merges: bool,
}

/// The weights of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// The base weights.
    pub params: &'a Params,
    /// Adapters freeze `params`: only the adapters have gradients.
    pub lora: Option<&'a Lora>,
}

impl<'a> Weights<'a> {
    /// All weights are trained, no adapters.
    pub fn full(params: &'a Params) -> Self {
        Self { params, lora: None }
    }
}

/// The trained values that gradients belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GradsOf {
    Params,
    Lora,
}

/// Gradients in the layout of the trained values: of all weights, or of the adapters.
#[derive(Debug)]
pub struct Grads {
    /// `[total]`, or empty while their memory is released.
    values: Buffer,
    total: usize,
    of: GradsOf,
    /// Places of the layers' matrices: most of the values, each written once by a backward pass.
    matrices: Vec<Range<usize>>,
    /// Whether the matrices count as zero, whatever their memory holds.
    pending: bool,
    /// Whether all are zero: nothing was written since they were set to it.
    zero: bool,
}

impl Grads {
    /// Zero gradients of all weights.
    pub fn of_params(layout: &ParamLayout) -> Self {
        Self::new(GradsOf::Params, layout.total(), matrices(layout))
    }

    /// Zero gradients of adapters.
    pub fn of_lora(layout: &LoraLayout) -> Self {
        Self::new(GradsOf::Lora, layout.table().total(), Vec::new())
    }

    fn new(of: GradsOf, total: usize, matrices: Vec<Range<usize>>) -> Self {
        Self {
            values: Buffer::zeros(total),
            total,
            of,
            matrices,
            pending: false,
            zero: true,
        }
    }

    /// Gives the memory back if all gradients are zero. The next backward pass, or [`Grads::settle`], takes
    /// new memory.
    pub fn release(&mut self) {
        if self.zero {
            self.values = Buffer::default();
            self.pending = false;
        }
    }

    /// Whether the memory is given back.
    pub fn is_released(&self) -> bool {
        self.values.len() != self.total
    }

    /// Takes memory again if it was given back.
    fn hold(&mut self) {
        if self.is_released() {
            self.values = Buffer::zeros(self.total);
        }
    }

    /// Bytes that they hold.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.values)
    }

    /// Sets all to 0, for the next step.
    pub fn zero(&mut self) {
        self.values.fill(0.0);
        self.pending = false;
        self.zero = true;
    }

    /// [`Grads::zero`] on all threads: a single one does not reach the speed of memory. The next backward
    /// pass writes the matrices of the layers instead of adding to them; without one, call [`Grads::settle`]
    /// before the values are used.
    pub fn restart(&mut self, dev: &Cpu) {
        if self.is_released() {
            return;
        }
        let mut kept = 0;
        let mut others = Vec::with_capacity(self.matrices.len() + 1);
        for matrix in &self.matrices {
            others.push(kept..matrix.start);
            kept = matrix.end;
        }
        others.push(kept..self.values.len());
        clear(dev, &mut self.values, &others);
        self.pending = !self.matrices.is_empty();
        self.zero = true;
    }

    /// Writes the zeros that [`Grads::restart`] or [`Grads::release`] left to a backward pass, if none came.
    pub fn settle(&mut self, dev: &Cpu) {
        self.hold();
        if std::mem::take(&mut self.pending) {
            clear(dev, &mut self.values, &self.matrices);
        }
    }

    /// All values, padding included.
    ///
    /// # Panics
    /// If neither a backward pass nor [`Grads::settle`] came after [`Grads::restart`] or [`Grads::release`].
    pub fn values(&self) -> &[f32] {
        self.check_settled();
        &self.values
    }

    /// All values, for scaling or reduction in place; panics as [`Grads::values`].
    pub fn values_mut(&mut self) -> &mut [f32] {
        self.check_settled();
        self.zero = false;
        &mut self.values
    }

    fn check_settled(&self) {
        assert!(
            !self.pending && !self.is_released(),
            "gradients were restarted or released: a backward pass or `settle` comes first"
        );
    }
}

/// Places of the layers' matrices, ascending.
fn matrices(layout: &ParamLayout) -> Vec<Range<usize>> {
    let layers = layout.layers.iter();
    layers
        .flat_map(|l| [&l.qkv, &l.o, &l.gate_up, &l.down].map(Range::clone))
        .collect()
}

/// Sets `ranges` (ascending, disjoint) of `values` to 0 on all threads.
fn clear(dev: &Cpu, values: &mut [f32], ranges: &[Range<usize>]) {
    const GRAIN: usize = 1 << 16;
    let (mut rest, mut at) = (values, 0);
    let mut parts = Vec::new();
    for range in ranges {
        let (_, from) = std::mem::take(&mut rest).split_at_mut(range.start - at);
        let (part, behind) = from.split_at_mut(range.len());
        parts.extend(part.chunks_mut(GRAIN).map(Mutex::new));
        (rest, at) = (behind, range.end);
    }
    dev.pool().parallel_for(parts.len(), &|part| {
        // Each part is locked once, so that no lock can be poisoned before.
        let mut part = parts[part].lock().unwrap_or_else(PoisonError::into_inner);
        part.fill(0.0);
    });
}

impl TrainModel {
    /// A decoder for sequences of at most `context` tokens (and at most the model's own context).
    ///
    /// # Errors
    /// If the configuration is impossible.
    pub fn new(config: &ModelConfig, context: usize) -> Result<Self, ConfigError> {
        Ok(Self {
            decoder: Decoder::new(config, context)?,
            merges: true,
        })
    }

    /// Adds the products of adapters to those of the weights: the bits of an engine with adapters that are
    /// not merged ([`crate::InferBatch::adapters`]), and less work for short passes. Otherwise adapters are
    /// merged for each product: the bits of an engine with merged weights.
    #[must_use]
    pub fn adding_adapters(self) -> Self {
        Self {
            merges: false,
            ..self
        }
    }

    /// The decoder's shape and constants.
    pub fn config(&self) -> &ModelConfig {
        &self.decoder.config
    }

    /// Bytes of the tables that depend on the context only.
    pub fn bytes(&self) -> usize {
        self.decoder.rope.bytes()
    }

    /// Refuses weights of another decoder.
    fn pass<'a>(&'a self, dev: &'a Cpu, weights: Weights<'a>) -> Result<Pass<'a>, ForwardError> {
        let other = weights.params.config() != &self.decoder.config
            || weights
                .lora
                .is_some_and(|lora| lora.model() != &self.decoder.config);
        if other {
            return Err(ForwardError::State(
                "weights or adapters are those of another decoder",
            ));
        }
        Ok(Pass {
            dev,
            decoder: &self.decoder,
            weights,
            merges: self.merges,
        })
    }
}

/// The parts that every step of a pass reads.
#[derive(Clone, Copy)]
struct Pass<'a> {
    dev: &'a Cpu,
    decoder: &'a Decoder,
    weights: Weights<'a>,
    merges: bool,
}

impl<'a> Pass<'a> {
    /// The adapter of the output projection, if it has one.
    fn head_adapter(&self) -> Option<LowRank<'a>> {
        self.weights.lora?.head(self.merges)
    }

    fn config(&self) -> &'a ModelConfig {
        &self.decoder.config
    }

    fn layout(&self) -> &'a ParamLayout {
        self.weights.params.layout()
    }

    fn values(&self, range: &std::ops::Range<usize>) -> &'a [f32] {
        &self.weights.params.values()[range.clone()]
    }
}
