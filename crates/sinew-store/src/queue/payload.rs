//! Encodes values of any type as the bytes of a field, with compression.

use crate::codec;
use crate::error::{RecordError, StoreError};
use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Encodes a value: codec, uncompressed length (4 bytes, little-endian), MessagePack.
///
/// # Errors
/// If it cannot be encoded.
pub fn pack<T: Serialize>(key: &str, value: &T) -> Result<Bytes, StoreError> {
    let encoded = codec::encode(value, true).map_err(|reason| StoreError::Encode {
        episode: sinew_types::EpisodeId::new(key),
        reason,
    })?;
    let mut bytes = vec![encoded.codec as u8];
    bytes.extend(encoded.raw_len.to_le_bytes());
    bytes.extend(encoded.bytes);
    Ok(bytes.into())
}

/// Decodes a value, the inverse of [`pack`].
///
/// # Errors
/// [`StoreError::Row`] if the bytes are of something else.
pub fn unpack<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T, StoreError> {
    let corrupt = |reason: RecordError| StoreError::Row {
        key: key.to_owned(),
        reason: reason.to_string(),
    };
    let [codec, a, b, c, d, rest @ ..] = bytes else {
        return Err(corrupt(RecordError::Bytes("shorter than its header")));
    };
    let raw_len = u32::from_le_bytes([*a, *b, *c, *d]);
    codec::decode(*codec, raw_len, rest).map_err(corrupt)
}
