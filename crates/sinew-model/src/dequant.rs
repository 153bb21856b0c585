//! Decodes stored numbers to f32: plain types and the block formats of GGUF.
//!
//! Block formats follow the layout of ggml (`ggml-common.h`, `ggml-quants.c`): 32 values a block, or 256 for
//! the K formats; scales are little-endian f16 in front of (K: around) the packed bits. The values for scale
//! `s`, minimum `m` and packed integer `n` are:
//!
//! | type | value |
//! |---|---|
//! | Q4_0, Q5_0 | `s (n - 8)`, `s (n - 16)` |
//! | Q4_1, Q5_1 | `s n + m` |
//! | Q8_0 | `s n`, signed |
//! | Q4_K, Q5_K | `s s_j n - m m_j`, with 6-bit `s_j`, `m_j` for each 32 values |
//! | Q6_K | `s s_j (n - 32)`, with 8-bit `s_j` for each 16 values |

use crate::source::ReadAt;
use half::{bf16, f16};
use std::io;

/// Storage type of numbers in a file. All are read as f32; the model never computes in a block format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl StoredType {
    /// Type of a GGUF tensor by its number; `None` for types that are not decoded here.
    pub(crate) fn from_ggml(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            30 => Self::Bf16,
            _ => return None,
        })
    }

    /// The types that [`StoredType::from_ggml`] supports, for error messages.
    pub(crate) const GGML_SUPPORTED: &'static str = "F32 (0), F16 (1), Q4_0 (2), Q4_1 (3), Q5_0 (6), Q5_1 (7), Q8_0 (8), Q4_K (12), Q5_K (13), \
         Q6_K (14), BF16 (30)";

    /// Values and bytes of one block; plain types are blocks of one value.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q4K => (256, 144),
            Self::Q5K => (256, 176),
            Self::Q6K => (256, 210),
        }
    }

    /// Bytes of `values` numbers; `None` when they do not fill whole blocks or overflow.
    pub fn bytes_of(self, values: usize) -> Option<usize> {
        let (block_values, block_bytes) = self.block();
        if !values.is_multiple_of(block_values) {
            return None;
        }
        (values / block_values).checked_mul(block_bytes)
    }

    /// Decodes whole blocks.
    ///
    /// # Panics
    /// If `bytes` and `out` do not match in size (see [`StoredType::bytes_of`]).
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(
            self.bytes_of(out.len()),
            Some(bytes.len()),
            "stored bytes match the values"
        );
        let (block_values, block_bytes) = self.block();
        let blocks = bytes
            .chunks_exact(block_bytes)
            .zip(out.chunks_exact_mut(block_values));
        match self {
            Self::F32 => {
                blocks.for_each(|(b, o)| o[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            }
            Self::F16 => blocks.for_each(|(b, o)| o[0] = f16_at(b, 0)),
            Self::Bf16 => {
                blocks.for_each(|(b, o)| o[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32())
            }
            Self::Q4_0 => {
                blocks.for_each(|(b, o)| q4(f16_at(b, 0), -8.0 * f16_at(b, 0), &b[2..], o))
            }
            Self::Q4_1 => blocks.for_each(|(b, o)| q4(f16_at(b, 0), f16_at(b, 2), &b[4..], o)),
            Self::Q5_0 => blocks.for_each(|(b, o)| {
                q5(f16_at(b, 0), -16.0 * f16_at(b, 0), &b[2..6], &b[6..], o);
            }),
            Self::Q5_1 => {
                blocks.for_each(|(b, o)| q5(f16_at(b, 0), f16_at(b, 2), &b[4..8], &b[8..], o));
            }
            Self::Q8_0 => blocks.for_each(|(b, o)| {
                let scale = f16_at(b, 0);
                for (value, &q) in o.iter_mut().zip(&b[2..]) {
                    *value = scale * f32::from(q.cast_signed());
                }
            }),
            Self::Q4K => blocks.for_each(|(b, o)| q45k(b, None, &b[16..], o)),
            Self::Q5K => blocks.for_each(|(b, o)| q45k(b, Some(&b[16..48]), &b[48..], o)),
            Self::Q6K => blocks.for_each(|(b, o)| q6k(b, o)),
        }
    }
}

/// The half-precision number at a byte, little-endian.
fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// 16 bytes: low nibbles are values 0..16, high nibbles 16..32.
fn q4(scale: f32, offset: f32, packed: &[u8], out: &mut [f32]) {
    let (low, high) = out.split_at_mut(16);
    for ((l, h), &byte) in low.iter_mut().zip(high).zip(packed) {
        *l = scale * f32::from(byte & 15) + offset;
        *h = scale * f32::from(byte >> 4) + offset;
    }
}

/// Decodes like [`q4`], with a fifth bit of each value in a little-endian 32-bit word.
fn q5(scale: f32, offset: f32, fifth: &[u8], packed: &[u8], out: &mut [f32]) {
    let bits = u32::from_le_bytes([fifth[0], fifth[1], fifth[2], fifth[3]]);
    let (low, high) = out.split_at_mut(16);
    for (i, ((l, h), &byte)) in low.iter_mut().zip(high).zip(packed).enumerate() {
        let (fifth_l, fifth_h) = ((bits >> i) & 1, (bits >> (i + 16)) & 1);
        *l = scale * (u32::from(byte & 15) | fifth_l << 4) as f32 + offset;
        *h = scale * (u32::from(byte >> 4) | fifth_h << 4) as f32 + offset;
    }
}

/// Scale and minimum of sub-block `j` of a K block: 6 bits each, packed in 12 bytes.
fn scale_min_k(packed: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        let scale = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4);
        (scale, (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4))
    };
    (f32::from(scale), f32::from(min))
}

/// Q4_K, and Q5_K when `fifth` holds the fifth bits. 8 sub-blocks of 32 values.
fn q45k(block: &[u8], fifth: Option<&[u8]>, packed: &[u8], out: &mut [f32]) {
    let (d, d_min) = (f16_at(block, 0), f16_at(block, 2));
    for (j, sub) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_min_k(&block[4..16], j);
        let (scale, min) = (d * scale, d_min * min);
        let bytes = &packed[j / 2 * 32..][..32];
        for (i, (value, &byte)) in sub.iter_mut().zip(bytes).enumerate() {
            let nibble = if j.is_multiple_of(2) {
                byte & 15
            } else {
                byte >> 4
            };
            let high = fifth.map_or(0, |bits| (bits[i] >> j) & 1);
            *value = scale * f32::from(nibble | high << 4) - min;
        }
    }
}

/// Q6_K: 128 bytes of low nibbles, 64 of high pairs, 16 signed scales, f16 scale of all.
fn q6k(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 208);
    for (part, values) in out.chunks_exact_mut(128).enumerate() {
        let low = &block[part * 64..][..64];
        let high = &block[128 + part * 32..][..32];
        let scales = &block[192 + part * 8..][..8];
        for (i, value) in values.iter_mut().enumerate() {
            // Four groups of 32: nibbles (low, low, high, high) of bytes (0..32, 32..64) twice.
            let (group, at) = (i / 32, i % 32);
            let byte = low[group % 2 * 32 + at];
            let nibble = if group < 2 { byte & 15 } else { byte >> 4 };
            let pair = (high[at] >> (2 * group)) & 3;
            let q = i16::from(nibble | pair << 4) - 32;
            *value = d * f32::from(scales[i / 16].cast_signed()) * f32::from(q);
        }
    }
}

/// Decodes `out.len()` values that start at byte `offset`, one million at a time: memory stays
/// small for any size of tensor.
pub(crate) fn read_decoded(
    source: &dyn ReadAt,
    offset: u64,
    stored: StoredType,
    out: &mut [f32],
) -> io::Result<()> {
    const CHUNK_VALUES: usize = 1 << 20;
    let mut bytes = Vec::new();
    let mut offset = offset;
    for chunk in out.chunks_mut(CHUNK_VALUES) {
        let len = stored
            .bytes_of(chunk.len())
            .ok_or(io::ErrorKind::InvalidData)?;
        bytes.resize(len, 0);
        source.read_exact_at(&mut bytes, offset)?;
        stored.decode(&bytes, chunk);
        offset += len as u64;
    }
    Ok(())
}
