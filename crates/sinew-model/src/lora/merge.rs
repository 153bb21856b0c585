//! Adapters and the weights below them: merged into one matrix, or as products that are added.

use super::{GroupPlaces, Lora, LoraLayout};
use crate::params::{Params, TensorMismatch};
use sinew_tensor::logprob::{LowRank, LowRankGrads};
use sinew_tensor::{Cpu, Mat, MatMut, Scratch, ops};
use sinew_types::{TensorSource, TensorView};

/// Names of the tensors of tied embeddings.
const EMBEDDINGS: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Reasons for which adapters cannot be merged into weights.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// Base, adapters and merged weights are not of one decoder.
    #[error(transparent)]
    Tensors(#[from] TensorMismatch),
    /// The merged weights have no place for an output projection.
    #[error(
        "the adapter on `lm_head` cannot be merged into weights with tied embeddings: they need an \
         `lm_head.weight`, so tie_word_embeddings has to be false"
    )]
    Tied,
}

impl GroupPlaces {
    /// The gradients of a group of one adapter, in the buffer of all.
    pub(crate) fn single_grads<'g>(&self, values: &'g mut [f32]) -> LowRankGrads<'g> {
        // B is behind A.
        let b = &self.parts[0].b;
        let (before, rest) = values.split_at_mut(b.start);
        LowRankGrads {
            a: &mut before[self.a.clone()],
            b: &mut rest[..b.len()],
        }
    }
}

impl Lora {
    /// The adapter of the output projection, if it has one, for logits of merged weights or of products that
    /// are added.
    pub(crate) fn head(&self, merged: bool) -> Option<LowRank<'_>> {
        let places = self.layout.head()?;
        Some(LowRank {
            a: &self.values[places.a.clone()],
            b: &self.values[places.parts[0].b.clone()],
            rank: self.config.rank,
            scale: self.scale(),
            merged,
        })
    }

    /// Adds the `index`-th adapter of a group to its matrix `w` `[width, in]`, always in `f32`, so
    /// that small changes are not rounded away before they are part of the weights. `scaled` is
    /// working memory.
    pub(crate) fn merge_part(
        &self,
        dev: &Cpu,
        places: &GroupPlaces,
        index: usize,
        w: &mut [f32],
        scaled: &mut Vec<f32>,
    ) {
        let (part, rank) = (&places.parts[index], self.config.rank);
        let input = places.a.len() / (rank * places.parts.len());
        let a = &self.values[places.a.clone()][index * rank * input..][..rank * input];
        scaled.clear();
        scaled.extend(self.values[part.b.clone()].iter().map(|b| b * self.scale()));
        let (b, a) = (Mat::new(scaled, part.width, rank), Mat::new(a, rank, input));
        let to = MatMut::new(w, part.width, input);
        dev.with_f32_products().matmul_nn(b, a, to, true);
    }

    /// `y += scale · (x Aᵀ) Bᵀ` for the adapters of a group: `x` `[rows, in]`, of at least one row; `y`
    /// `[rows, width]`, the outputs of the group side by side. All products multiply `f32` operands, and a
    /// row has the same bits in any batch. `inner` is working memory.
    pub(crate) fn add_products(
        &self,
        dev: &Cpu,
        places: &GroupPlaces,
        x: Mat<'_>,
        y: &mut [f32],
        inner: &mut Scratch,
    ) {
        let dev = dev.with_f32_products();
        let (rows, rank) = (x.rows(), self.config.rank);
        let (ranks, width) = (rank * places.parts.len(), y.len() / rows);
        let inner = inner.take(rows * ranks);
        let a = Mat::new(&self.values[places.a.clone()], ranks, x.cols());
        dev.matmul_nt(x, a, MatMut::new(inner, rows, ranks), false);
        ops::scale(&dev, self.scale(), inner);
        for (index, part) in places.parts.iter().enumerate() {
            let inner = Mat::with_ld(&inner[index * rank..], rows, rank, ranks);
            let b = Mat::new(&self.values[part.b.clone()], part.width, rank);
            let to = MatMut::with_ld(&mut y[part.column..], rows, part.width, width);
            dev.matmul_nt(inner, b, to, true);
        }
    }

    /// The decoder with these adapters merged into `base`, in new memory. With an adapter of the output
    /// projection it has a separate `lm_head.weight`, also if `base` ties it to the embeddings.
    ///
    /// # Errors
    /// If the adapters are those of another decoder.
    pub fn merged(&self, dev: &Cpu, base: &Params) -> Result<Params, MergeError> {
        let mut merged = Params::zeros(&self.config.merged_config(base.config()));
        merge_lora(dev, base, self, &mut merged)?;
        Ok(merged)
    }
}

/// Weights with tied embeddings as if they had a separate output projection: a copy of the embeddings.
struct Untied<'a>(&'a Params);

impl TensorSource for Untied<'_> {
    fn names(&self) -> Vec<String> {
        let mut names = self.0.names();
        names.push(HEAD.to_owned());
        names
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.0.tensor(if name == HEAD { EMBEDDINGS } else { name })
    }
}

/// `merged = base + adapters`: weights that compute the same without adapters. Overwrites `merged`, whose
/// configuration is that of `base`, or the same without tied embeddings: an adapter of the output projection
/// needs that ([`LoraConfig::merged_config`](super::LoraConfig::merged_config)).
///
/// # Errors
/// If the three are not of one decoder, or `merged` has no place for an adapted output projection. `merged`
/// is then as before.
pub fn merge_lora(
    dev: &Cpu,
    base: &Params,
    lora: &Lora,
    merged: &mut Params,
) -> Result<(), MergeError> {
    LoraLayout::new(&lora.config, base.config())
        .table
        .check(lora)?;
    let tied = merged.config().tied_embeddings;
    if tied && lora.layout.head.is_some() {
        return Err(MergeError::Tied);
    }
    if base.config().tied_embeddings && !tied {
        merged.copy_from(&Untied(base))?;
    } else {
        merged.copy_from(base)?;
    }
    let mut scaled = Vec::new();
    let layers = lora.layout.groups.iter();
    let layers = layers.map(|(&(layer, _), places)| (layer, places));
    for (layer, places) in layers.chain(lora.layout.head.iter().map(|places| (0, places))) {
        for (index, part) in places.parts.iter().enumerate() {
            let name = format!("{}.weight", part.projection.module(layer));
            if let Some(w) = merged.get_mut(&name) {
                lora.merge_part(dev, places, index, w, &mut scaled);
            }
        }
    }
    Ok(())
}
