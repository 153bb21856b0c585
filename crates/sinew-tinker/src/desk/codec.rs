//! Commands and results as bytes: MessagePack with names, compressed.

use super::types::Refusal;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Compression level: the lowest, since commands of megabytes wait for it.
const LEVEL: i32 = 1;

/// MessagePack with the names of fields, so that later formats can add some.
///
/// # Errors
/// If the value cannot be written, which does not depend on the client.
pub(super) fn pack<T: Serialize>(value: &T) -> Result<Vec<u8>, Refusal> {
    rmp_serde::to_vec_named(value).map_err(|e| Refusal::Failed(format!("not written: {e}")))
}

/// Reads what [`pack`] wrote.
pub(super) fn unpack<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Refusal> {
    rmp_serde::from_slice(bytes)
        .map_err(|e| Refusal::Failed(format!("the journal is damaged: {e}")))
}

/// Compresses.
pub(super) fn squeeze(bytes: &[u8]) -> Result<Vec<u8>, Refusal> {
    zstd::bulk::compress(bytes, LEVEL).map_err(|e| Refusal::Failed(format!("not written: {e}")))
}

/// Packs and compresses.
pub(super) fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, Refusal> {
    squeeze(&pack(value)?)
}

/// Reads what [`encode`] wrote.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Refusal> {
    let raw = zstd::stream::decode_all(bytes)
        .map_err(|e| Refusal::Failed(format!("the journal is damaged: {e}")))?;
    unpack(&raw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desk::types::{Command, Outcome, Reply, SampleInput, SamplerRef};
    use crate::{Datum, FbOutput, LossRequest, LossValue, Tensor};
    use std::collections::BTreeMap;

    #[test]
    fn commands_and_results_come_back_as_they_were() {
        let mut inputs = BTreeMap::new();
        inputs.insert("target_tokens".to_owned(), Tensor::integers(vec![1, -1, 3]));
        inputs.insert("weights".to_owned(), Tensor::floats(vec![0.5, -2.0, 0.0]));
        let mut config = BTreeMap::new();
        config.insert("beta".to_owned(), LossValue::Number(0.1));
        config.insert("mode".to_owned(), LossValue::Text("token".to_owned()));
        let command = Command::ForwardBackward {
            model: "s:train:0".into(),
            seq: 3,
            data: vec![Datum {
                tokens: vec![5, 6, 7],
                inputs: inputs.clone(),
            }],
            loss: LossRequest {
                name: "dro".to_owned(),
                config,
            },
            forward_only: false,
        };
        let bytes = encode(&command).unwrap();
        assert_eq!(decode::<Command>(&bytes).unwrap(), command);
        let sample = Command::Sample {
            sampler: SamplerRef::Base("tiny".to_owned()),
            seq: None,
            request: SampleInput {
                prompt: vec![1],
                samples: 2,
                ..SampleInput::default()
            },
        };
        assert_eq!(
            decode::<Command>(&encode(&sample).unwrap()).unwrap(),
            sample
        );
        let outcome = Outcome::Value(Reply::ForwardBackward(FbOutput {
            output_type: "T".to_owned(),
            outputs: vec![inputs],
            metrics: BTreeMap::from([("loss:sum".to_owned(), 1.5)]),
        }));
        assert_eq!(
            decode::<Outcome>(&encode(&outcome).unwrap()).unwrap(),
            outcome
        );
        assert!(decode::<Outcome>(b"nothing").is_err());
    }
}
