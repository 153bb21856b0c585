//! AdamW with f32 master weights and clipping by the global gradient norm, for policies whose weights lie in
//! host memory.
//!
//! Invariants: a non-finite gradient never reaches the weights or the moments; the result depends only on the
//! order of tensors and the arithmetic, so equal inputs give equal bits.

use super::{Outcome, Update};
use crate::policy_error::PolicyError;
use sinew_tensor::{Buffer, Cpu, ops};
use sinew_types::{TensorSource, TensorView};

/// A trainable tensor in host memory with its gradient, f32, row-major.
#[derive(Debug)]
pub struct HostTensor<'a> {
    /// Name in its file (Hugging Face or PEFT layout).
    pub name: &'a str,
    pub shape: &'a [usize],
    /// Whether weight decay applies: not to norms and biases.
    pub decay: bool,
    /// Factor on the learning rate.
    pub lr_scale: f32,
    /// The weights, updated in place.
    pub values: &'a mut [f32],
    /// The gradient, of the same length; not changed.
    pub gradient: &'a [f32],
}

/// First and second moments of one tensor.
#[derive(Clone, Debug)]
struct Moments {
    /// `m.NAME` and `v.NAME`, as in a checkpoint.
    names: [String; 2],
    shape: Vec<usize>,
    values: [Buffer; 2],
}

impl Moments {
    fn zeros(tensor: &HostTensor<'_>) -> Self {
        Self {
            names: names(tensor.name),
            shape: tensor.shape.to_vec(),
            values: [(); 2].map(|()| Buffer::zeros(tensor.values.len())),
        }
    }
}

fn names(tensor: &str) -> [String; 2] {
    ["m", "v"].map(|kind| format!("{kind}.{tensor}"))
}

/// The moments of all tensors, 8 bytes per weight; none before the first update.
#[derive(Clone, Debug)]
pub struct AdamW {
    moments: Vec<Moments>,
    device: Cpu,
}

impl AdamW {
    /// An optimizer without moments: all are 0 at the first update.
    pub fn new(device: Cpu) -> Self {
        Self {
            moments: Vec::new(),
            device,
        }
    }

    /// Bytes of all moments.
    pub fn bytes(&self) -> usize {
        let all = self.moments.iter().flat_map(|moments| &moments.values);
        all.map(|values| size_of_val(&**values)).sum()
    }

    /// Clips the gradients (globally) and applies one update.
    ///
    /// # Errors
    /// If the tensors are not those of the moments, in the same order.
    pub fn apply(
        &mut self,
        update: &Update,
        tensors: &mut [HostTensor<'_>],
    ) -> Result<Outcome, PolicyError> {
        let mut total = 0.0f64;
        for tensor in tensors.iter() {
            let square = ops::sum_of_squares(&self.device, tensor.gradient);
            if !square.is_finite() {
                return Ok(Outcome::SkippedNonFinite {
                    tensor: tensor.name.to_owned(),
                });
            }
            total += square;
        }
        let grad_norm = total.sqrt();
        let clip = match update.max_grad_norm.map(f64::from) {
            Some(max) if grad_norm > max => (max / grad_norm) as f32,
            _ => 1.0,
        };
        if self.moments.is_empty() {
            self.moments = tensors.iter().map(Moments::zeros).collect();
        }
        let same =
            |(m, t): (&Moments, &HostTensor<'_>)| m.names[0].strip_prefix("m.") == Some(t.name);
        if self.moments.len() != tensors.len() || !self.moments.iter().zip(&*tensors).all(same) {
            return Err(PolicyError::failed(
                "the moments are those of other tensors".to_owned(),
            ));
        }
        for (tensor, moments) in tensors.iter_mut().zip(&mut self.moments) {
            let config = &update.adamw;
            let settings = ops::AdamW {
                lr: update.lr * tensor.lr_scale,
                beta1: config.beta1,
                beta2: config.beta2,
                eps: config.epsilon,
                weight_decay: if tensor.decay {
                    config.weight_decay
                } else {
                    0.0
                },
            };
            let [m, v] = &mut moments.values;
            let (values, gradient) = (&mut *tensor.values, tensor.gradient);
            let (dev, number) = (&self.device, update.number);
            ops::adamw(dev, &settings, number, clip, values, gradient, m, v);
        }
        Ok(Outcome::Applied { grad_norm })
    }

    /// Overwrites the tensors with `weights`, and the moments with `moments` (`None` before the first
    /// update).
    ///
    /// # Errors
    /// If a tensor is missing, has another shape or is unknown. Nothing is changed in that case.
    pub fn restore(
        &mut self,
        tensors: &mut [HostTensor<'_>],
        weights: &dyn TensorSource,
        moments: Option<&dyn TensorSource>,
    ) -> Result<(), PolicyError> {
        for tensor in tensors.iter() {
            check(weights, tensor.name, tensor.shape)?;
            if let Some(moments) = moments {
                for name in names(tensor.name) {
                    check(moments, &name, tensor.shape)?;
                }
            }
        }
        let known = |name: &String| tensors.iter().any(|t| t.name == name);
        if let Some(name) = weights.names().iter().find(|name| !known(name)) {
            return Err(PolicyError::failed(format!(
                "tensor {name} is not part of this model"
            )));
        }
        self.moments.clear();
        for tensor in tensors.iter_mut() {
            tensor
                .values
                .copy_from_slice(&values(weights, tensor.name)?);
            if let Some(source) = moments {
                let mut own = Moments::zeros(tensor);
                for (name, to) in own.names.iter().zip(&mut own.values) {
                    to.copy_from_slice(&values(source, name)?);
                }
                self.moments.push(own);
            }
        }
        Ok(())
    }
}

fn missing(name: &str) -> PolicyError {
    PolicyError::failed(format!("{name} is missing"))
}

fn check(source: &dyn TensorSource, name: &str, shape: &[usize]) -> Result<(), PolicyError> {
    match source.info(name) {
        Some(found) if found.shape == shape => Ok(()),
        Some(found) => {
            let found = found.shape;
            Err(PolicyError::failed(format!(
                "{name} has shape {found:?}, expected {shape:?}"
            )))
        }
        None => Err(missing(name)),
    }
}

fn values<'a>(
    source: &'a dyn TensorSource,
    name: &str,
) -> Result<std::borrow::Cow<'a, [f32]>, PolicyError> {
    let view = source.tensor(name).ok_or_else(|| missing(name))?;
    Ok(view.into_f32())
}

/// The moments as tensors: `m.NAME` and `v.NAME` of each.
impl TensorSource for AdamW {
    fn names(&self) -> Vec<String> {
        let both = self.moments.iter().flat_map(|moments| &moments.names);
        both.cloned().collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.moments.iter().find_map(|moments| {
            let at = moments.names.iter().position(|own| own == name)?;
            TensorView::f32(&moments.shape, &moments.values[at]).ok()
        })
    }
}
