//! Decoders of the Llama, Qwen2 and Qwen3 families: configuration, weights, inference, training.
//!
//! Weights come from GGUF files or safetensors directories ([`resolve_model`], [`load_model`]) into
//! [`Params`]: one flat f32 buffer under the names of the Hugging Face layout. The same weights
//! serve generation over paged keys and values, and training over packed sequences that share
//! prefixes; gradients and optimizer states have the layout of the weights.
//!
//! | part | purpose |
//! |---|---|
//! | [`ModelConfig`] | shape and constants of a decoder |
//! | [`ModelShape`] | sizes of any decoder of `transformers`, for counting only |
//! | [`resolve_model`] | from `model = "..."` to files: a path, a Python package, the hub |
//! | [`load_model`], [`save_pretrained`] | files to weights and back |
//! | [`Params`], [`Lora`] | weights and adapters, each one flat buffer with a table of tensors |
//! | [`InferModel`] | generation: packed weights, one pass over a ragged batch |
//! | [`Scorer`] | reward models: one number for a sequence |
//! | [`TrainModel`] | training: log-probabilities, values, and their gradients |
//!
//! Invariants: a file's counts and offsets are checked before memory is taken for them; a tensor that is
//! missing, left over or mis-shaped is an error that names it; a row's result does not depend on the other
//! rows of its batch. Nothing here reads a clock, the environment or the home directory; only
//! [`resolve_model`] reaches the network, and only through the feature `hub` and the addresses in its
//! [`ResolveEnv`].
//!
//! Tests compare small random models with a plain reference implementation and with gradients by differences.
//! They check files against damaged and hostile variants of themselves.

mod config;
mod decoder;
mod dequant;
mod error;
mod gguf;
mod hub;
mod infer;
mod load;
mod lookup;
mod lora;
mod package;
mod params;
mod precision;
mod resolve;
mod safetensors;
mod save;
mod scorer;
mod shape;
mod source;
#[cfg(test)]
mod testing;
mod train;

pub use config::{ConfigError, Family, ModelConfig, RopeScaling};
pub use decoder::ForwardError;
pub use dequant::StoredType;
pub use error::{HubError, LoadError, LoraError};
pub use gguf::{Gguf, GgufArray, GgufError, GgufMetadata, GgufTensor, GgufValue};
pub use hub::HubRows;
pub use infer::{InferBatch, InferModel, InferModelError, InferScratch};
pub use load::{LoadedModel, check_model, load_config, load_gguf_metadata, load_model};
pub use lookup::{ModelFiles, Progress, ProgressSink, ResolveEnv, ResolveError};
pub use lora::{Lora, LoraConfig, LoraLayout, MergeError, Projection, merge_lora};
pub use params::{ParamEntry, ParamLayout, Params, TensorMismatch, TensorTable};
pub use precision::Precision;
pub use resolve::{Dataset, model_of_service, resolve_dataset, resolve_model};
pub use safetensors::{Safetensors, SafetensorsError};
pub use save::{SaveDtype, save_pretrained};
pub use scorer::{Scorer, check_scorer};
pub use shape::ModelShape;
pub use source::{FileSource, ReadAt};
pub use train::{
    Activations, Grads, Keep, Logprobs, OutputGrads, TrainModel, ValueGrads, ValueHead, Weights,
};
