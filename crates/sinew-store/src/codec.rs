//! Encodes traces, scores and batch marks as bytes: MessagePack with field names, compressed with zstd.
//!
//! The encoding is self-describing. Floats are preserved bit for bit, including NaN.
//!
//! Two layouts use it: records of segment files, whose header contains codec and length, and packed fields of
//! queue rows, which begin with the same five bytes. Adding, renaming or removing a field of a structure
//! creates another format.

use crate::error::RecordError;
use crate::store::TrainedBatch;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::collections::BTreeMap;

/// Minimum size of records that are compressed, in bytes.
const COMPRESS_FROM: usize = 256;

/// zstd's default level: about 300 MB/s on one core.
const LEVEL: i32 = 3;

/// Encoding of a record's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Codec {
    /// Plain MessagePack.
    Plain = 0,
    /// MessagePack compressed with zstd; the record's header contains the uncompressed length.
    Zstd = 1,
    /// A trace in columns, see [`crate::packed`]; only in segment files.
    Columns = 2,
}

/// A payload as it is stored.
#[derive(Clone, Debug)]
pub(crate) struct Encoded {
    /// Codec, which the record's header contains as a number.
    pub(crate) codec: Codec,
    /// Length before compression.
    pub(crate) raw_len: u32,
    /// The payload, compressed if `codec` compresses.
    pub(crate) bytes: Vec<u8>,
}

/// Stored form of a batch mark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Mark {
    /// Name of the update; unique in a store.
    pub(crate) batch: String,
    /// Number of the optimizer update.
    pub(crate) step: u64,
    /// Trained episodes, in the order of the batch.
    pub(crate) episodes: Vec<String>,
    /// Episodes without a training row, with the reason.
    pub(crate) dropped: BTreeMap<String, String>,
    /// Number of the owner; 0 without one.
    pub(crate) fence: u64,
    /// JSON of the caller, which the store does not interpret.
    pub(crate) detail: String,
}

impl Mark {
    /// Creates the mark of an update. The index's row of a mark is the inverse.
    pub(crate) fn of(update: &TrainedBatch) -> Self {
        let dropped = update.dropped.iter();
        Self {
            batch: update.batch.clone(),
            step: update.step,
            episodes: update.episodes.iter().map(|e| e.0.clone()).collect(),
            dropped: dropped.map(|(e, why)| (e.0.clone(), why.clone())).collect(),
            fence: update.fence,
            detail: update.detail.to_string(),
        }
    }
}

/// Encodes a value. The compressed form is used only if it is smaller.
///
/// # Errors
/// If the value cannot be encoded, or is larger than 4 GiB.
pub(crate) fn encode<T: Serialize>(value: &T, compress: bool) -> Result<Encoded, RecordError> {
    let raw = rmp_serde::to_vec_named(value)?;
    let raw_len = u32::try_from(raw.len()).map_err(|_| RecordError::Bytes("larger than 4 GiB"))?;
    let plain = |raw| Encoded {
        codec: Codec::Plain,
        raw_len,
        bytes: raw,
    };
    if !compress || raw.len() < COMPRESS_FROM {
        return Ok(plain(raw));
    }
    let packed = zstd::bulk::compress(&raw, LEVEL)?;
    if packed.len() >= raw.len() {
        return Ok(plain(raw));
    }
    Ok(Encoded {
        codec: Codec::Zstd,
        raw_len,
        bytes: packed,
    })
}

/// Decodes a payload with the codec and length of its header; `raw_len` limits the memory that decompression
/// allocates. The caller has verified the checksum, so an error means that another program or a newer version
/// wrote it.
pub(crate) fn decode<T: DeserializeOwned>(
    codec: u8,
    raw_len: u32,
    bytes: &[u8],
) -> Result<T, RecordError> {
    let raw_len = raw_len as usize;
    let unpacked;
    let raw = match codec {
        c if c == Codec::Plain as u8 => bytes,
        c if c == Codec::Zstd as u8 => {
            unpacked = zstd::bulk::decompress(bytes, raw_len)?;
            &unpacked
        }
        other => return Err(RecordError::Codec(other)),
    };
    if raw.len() != raw_len {
        return Err(RecordError::Length {
            found: raw.len(),
            expected: raw_len,
        });
    }
    Ok(rmp_serde::from_slice(raw)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_survive_bit_for_bit() {
        let values = vec![0.1f64, f64::NAN, f64::MIN_POSITIVE, -0.0, 1.0 / 3.0];
        let encoded = encode(&values, true).unwrap();
        let back: Vec<f64> = decode(encoded.codec as u8, encoded.raw_len, &encoded.bytes).unwrap();
        let bits = |v: &[f64]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&back), bits(&values));
    }

    #[test]
    fn a_wrong_length_is_refused() {
        let encoded = encode(&vec![7u32; 10_000], true).unwrap();
        assert_eq!(encoded.codec, Codec::Zstd);
        for raw_len in [encoded.raw_len - 1, encoded.raw_len + 1] {
            let decoded = decode::<Vec<u32>>(1, raw_len, &encoded.bytes);
            assert!(decoded.is_err());
        }
        assert!(decode::<Vec<u32>>(9, 1, &[0]).is_err());
    }
}
