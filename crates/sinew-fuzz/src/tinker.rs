//! Bodies of the Tinker SDK.

use sinew_tinker::Tensor;
use sinew_tinker::wire::{WireLimits, read_sample, read_train_request};

/// Names of fields, and JSON that is nearly a request.
pub(crate) const WORDS: &[&str] = &[
    "target_tokens",
    "weights",
    "cross_entropy",
    "\"chunks\":[]",
    "\"type\":\"encoded_text\"",
    "\"tokens\":[1,2]",
    "\"seq_id\":0,",
    "\"stop\":[],",
    "\"shape\":[2,9]",
    "\"sparse_crow_indices\":[0,1,2]",
    "-1",
    "1e999",
    "null",
    "9223372036854775808",
];

/// Bounds that a short input can reach.
const LIMITS: WireLimits = WireLimits {
    datums: 16,
    tensor_values: 4096,
};

/// A body in protobuf and in JSON. It is refused with a message, or its tensors are within the limits and
/// have as many numbers as their shapes say.
pub(crate) fn tinker(data: &[u8]) {
    match read_train_request(data.to_vec().into(), &LIMITS) {
        Err(refused) => assert!(!refused.to_string().is_empty()),
        Ok(request) => {
            assert!(request.seq >= 1 && request.data.len() <= LIMITS.datums);
            let tensors = request.data.iter().flat_map(|datum| datum.inputs.values());
            let numbers: usize = tensors.map(whole).sum();
            assert!(numbers as u64 <= LIMITS.tensor_values);
        }
    }
    match read_sample(data, &LIMITS) {
        Err(refused) => assert!(!refused.to_string().is_empty()),
        Ok(request) => {
            assert!(!request.input.prompt.is_empty() && request.input.samples >= 1);
            if let Some(targets) = &request.input.targets {
                assert_eq!(targets.shape[0], request.input.prompt.len() - 1);
                assert!(whole(targets) as u64 <= LIMITS.tensor_values);
            }
        }
    }
}

/// Numbers of a tensor, which are as many as its shape says.
fn whole(tensor: &Tensor) -> usize {
    assert_eq!(tensor.shape.iter().product::<usize>(), tensor.len());
    tensor.len()
}
