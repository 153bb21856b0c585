//! The wire: bodies of requests and answers, in protobuf and JSON, to the types of the crate and back.
//!
//! | part | purpose |
//! |---|---|
//! | `proto` | messages of the SDK in protobuf |
//! | `tensor` | tensors, dense and sparse |
//! | `train` | `forward_backward` and its result |
//! | `sample` | `asample` and its result |
//! | `requests` | all other bodies, in JSON |
//! | `client` | the other direction: requests of the client, and the results that it reads |
//!
//! A body is checked while it is read: numbers of datums and of tensor values are bounded, and a field that
//! is not known is refused with its name. Images and audio are refused.

pub(crate) mod client;
mod proto;
pub(crate) mod requests;
mod sample;
mod tensor;
#[cfg(test)]
mod tests;
mod train;

pub(crate) use sample::sample_output_json;
pub use sample::{SampleRequest, read_sample, write_sample_output};
pub use train::{TrainRequest, WireLimits, read_train_request, write_train_output};
pub(crate) use train::{checked_seq, metrics_json, read_train_json, train_output_json};

use crate::error::TinkerError;
use prost::Message;
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer};
use serde_json::{Map, Value};

/// Content type of protobuf.
pub const PROTOBUF: &str = "application/x-protobuf";

/// Reads a body in JSON.
///
/// # Errors
/// Names the field, its problem, and the place in the text.
pub(crate) fn json<T: DeserializeOwned>(body: &[u8]) -> Result<T, TinkerError> {
    let mut reader = serde_json::Deserializer::from_slice(body);
    let value = typed(&mut reader)?;
    reader.end().map_err(|error| wrong("the body", &error))?;
    Ok(value)
}

/// Reads a body in JSON, without the `type` that the SDK puts into each: the path says the same.
///
/// # Errors
/// Names the field and its problem.
pub(crate) fn request<T: DeserializeOwned>(body: &[u8]) -> Result<T, TinkerError> {
    let mut fields: Map<String, Value> = json(body)?;
    fields.remove("type");
    typed(Value::Object(fields))
}

/// Model and number of a command whose body cannot be read otherwise.
#[derive(Debug, Deserialize)]
struct Place {
    model_id: String,
    seq_id: i64,
}

/// Model and number of a command in JSON, whatever else its body has.
pub(crate) fn place(body: &[u8]) -> Option<(String, u64)> {
    let place: Place = serde_json::from_slice(body).ok()?;
    Some((place.model_id, checked_seq(place.seq_id).ok()?))
}

/// Same as [`place`], of a body in protobuf.
pub(crate) fn proto_place(body: &[u8]) -> Option<(String, u64)> {
    let place = proto::Place::decode(body).ok()?;
    let seq = checked_seq(i64::from(place.seq_id)).ok()?;
    Some((place.model_id, seq))
}

fn typed<'a, T, D>(reader: D) -> Result<T, TinkerError>
where
    T: DeserializeOwned,
    D: Deserializer<'a, Error = serde_json::Error>,
{
    serde_path_to_error::deserialize(reader).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." {
            "the body"
        } else {
            path.as_str()
        };
        wrong(field, error.inner())
    })
}

fn wrong(field: &str, error: &serde_json::Error) -> TinkerError {
    let allowed = "JSON with the fields of the SDK's request";
    TinkerError::value(field, format!("not as expected ({error})"), allowed)
}
