//! Event files of TensorBoard: records of protobuf messages with masked checksums.
//!
//! A record is its length (8 bytes, little endian), the checksum of the length, the message, the checksum of
//! the message. The fields are those of TensorFlow's `event.proto` and `summary.proto`. Pure.

use crate::crc::masked;
use prost::encoding::{WireType, double, encode_key, encode_varint, float, int64, string};

/// Numbers of the fields of `Event`.
const WALL_TIME: u32 = 1;
const STEP: u32 = 2;
const FILE_VERSION: u32 = 3;
const SUMMARY: u32 = 5;
/// Of `Summary`, then of `Summary.Value`.
const VALUE: u32 = 1;
const TAG: u32 = 1;
const SIMPLE_VALUE: u32 = 2;

/// The record that begins a file.
pub(crate) fn header(wall_s: f64) -> Vec<u8> {
    let mut event = Vec::new();
    double::encode(WALL_TIME, &wall_s, &mut event);
    string::encode(FILE_VERSION, &"brain.Event:2".to_owned(), &mut event);
    record(&event)
}

/// A record with the scalars of a step.
pub(crate) fn scalars(wall_s: f64, step: u64, values: &[(String, f64)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, number) in values {
        let mut value = Vec::new();
        string::encode(TAG, tag, &mut value);
        float::encode(SIMPLE_VALUE, &(*number as f32), &mut value);
        message(VALUE, &value, &mut summary);
    }
    let mut event = Vec::new();
    double::encode(WALL_TIME, &wall_s, &mut event);
    int64::encode(STEP, &(step as i64), &mut event);
    message(SUMMARY, &summary, &mut event);
    record(&event)
}

/// A field that is a message.
fn message(field: u32, bytes: &[u8], out: &mut Vec<u8>) {
    encode_key(field, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

/// A message with its length and checksums.
fn record(message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u64).to_le_bytes();
    let mut out = Vec::with_capacity(message.len() + 16);
    out.extend_from_slice(&length);
    out.extend_from_slice(&masked(&length).to_le_bytes());
    out.extend_from_slice(message);
    out.extend_from_slice(&masked(message).to_le_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_the_length_of_its_message() {
        let bytes = header(1.0);
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!(bytes.len(), length + 16);
        assert!(bytes.windows(13).any(|w| w == b"brain.Event:2"));
        let none = scalars(1.0, 0, &[]);
        assert!(none.len() > 16);
    }
}
