//! Compact encoding of traces: the description as MessagePack, the numbers as columns, and everything
//! compressed.
//!
//! | part | bytes |
//! |---|---|
//! | length of the head | 4 |
//! | head: the trace without tokens and log-probabilities, and how many each node has | as it says |
//! | token ids of all nodes: all first bytes, then all second ones, ... | 4 each |
//! | log-probabilities, in the same way, the byte with the exponent first | 4 each |
//!
//! Bytes of one kind are adjacent, so that constant bytes compress to almost nothing. Field names are in a
//! compression dictionary ([`HEADS`]), since they would be a third of the rest in a short episode. The head
//! is self-describing.
//!
//! The record of an episode of four turns, with 328 random ids of a vocabulary of 49,152 and 192 random
//! log-probabilities, has 1,586 bytes; in memory only these numbers have 2,080.

use crate::codec::{self, Codec, Encoded};
use crate::error::RecordError;
use serde::{Deserialize, Serialize};
use sinew_types::{Node, Trace};
use std::cell::RefCell;
use std::sync::LazyLock;
use zstd::bulk::{Compressor, Decompressor};
use zstd::dict::{DecoderDictionary, EncoderDictionary};

/// Compression level 1, the fastest usual one of zstd: the numbers of a trace are incompressible, and its
/// text is short.
const LEVEL: i32 = 1;

/// Dictionary of bytes that heads have in common, in MessagePack encoding; the most common ones are last. The
/// dictionary is part of the format: changing it requires a new codec.
const HEADS: &[u8] = b"\xa5trace\x8b\xaeformat_version\x03\xa7episode\xaed00000000-e0-r1\xa5group\xa9d00000000\
\xa4task\xactask/train/0\xa9task_kind\xa4code\xa6origin\x83\xa3run\xa3run\xa4draw\x00\xa7purpose\
\xabeval-before\xaaeval-after\xa8external\xa5train\xaaprovenance\x88\xa9task_seed\xcf\xa4seed\xcf\
\xabenvironment\x82\xa4name\xa7version\xa11\xa8sampling\x85\xabtemperature\xca\x3f\x80\x00\x00\xa5top_p\
\xca\x3f\x80\x00\x00\xa5top_k\x00\xa5min_p\xca\x00\x00\x00\x00\xaamax_tokens\x40\xadchat_template\xd9\x40\
\xa5tools\xa7kernels\xa7sandbox\xa7process\xa6format\x81\xa3law\xa8unscored\xc3\xafunscored_reason\xa6answer\
\xa7outcome\x83\xa6reward\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\xa7success\xc3\xa7metrics\x81\xaatool_calls\xcb\
\xa7outcome\x83\xa6reward\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xa7success\xc2\xa7metrics\x80\xa3end\x83\xa4type\
\xa6failed\xa4kind\xa6engine\xa7message\xa3end\x82\xa4type\xa9truncated\xa5limit\xa5turns\xa3end\x81\xa4type\
\xaaterminated\xa6timing\x85\xaestarted_unix_s\xcb\x41\xda\xa7total_s\xcb\xabgenerate_s\xcb\xa6tool_s\xcb\
\xa7queue_s\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xa7ignored\x80\xa6tokens\xa8logprobs\
\x84\xa4role\xa4tool\xa7content\xactool_call_id\xa4name\x83\xa4role\xa9assistant\xa7content\xa0\xaatool_calls\x91\
\x83\xa2id\xa4name\xa9arguments\x81\xa9reasoning\x82\xa4role\xa6system\xa7content\x82\xa4role\xa4user\xa7content\
\xa5nodes\x92\x8a\xa6parent\xce\xff\xff\xff\xff\xa4turn\x00\xa4kind\xa6prompt\xa6tokens\x90\xa8logprobs\x90\
\xa8versions\x90\xa8messages\x91\xa6finish\xc0\xaeprocess_reward\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xaastate_hash\xcf\
\x8b\xa6parent\x00\xa4turn\x01\xa4kind\xa6forced\xa6tokens\x90\xa8logprobs\x90\xabtemperature\xca\xa8versions\x91\
\x83\xa5start\x00\xa3len\x10\xa7version\x00\xa8messages\x90\xa6finish\x81\xaastop_string\x81\xa4text\xa6finish\x82\
\xa4type\xa7stop_id\xa2id\x02\xaeprocess_reward\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xaastate_hash\xc0\
\x8a\xa6parent\x02\xa4turn\x03\xa4kind\xabobservation\xa6tokens\x90\xa8logprobs\x90\xa8versions\x90\xa8messages\x90\
\xa6finish\xc0\xaeprocess_reward\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xaastate_hash\xc0\
\x8a\xa6parent\x03\xa4turn\x04\xa4kind\xa7sampled\xa6tokens\x90\xa8logprobs\x90\xa8versions\x91\x83\xa5start\x00\
\xa3len\x30\xa7version\x00\xa8messages\x90\xa6finish\x81\xa4type\xa6length\xaeprocess_reward\xcb\x00\x00\x00\x00\
\x00\x00\x00\x00\xaastate_hash\xc0";

static ENCODER: LazyLock<EncoderDictionary<'static>> =
    LazyLock::new(|| EncoderDictionary::copy(HEADS, LEVEL));
static DECODER: LazyLock<DecoderDictionary<'static>> =
    LazyLock::new(|| DecoderDictionary::copy(HEADS));

thread_local! {
    /// Compressor of this thread. Creating one takes longer than compressing an episode.
    static COMPRESSOR: RefCell<Option<Compressor<'static>>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// A trace without its numbers, and the count of numbers in each node.
#[derive(Serialize, Deserialize)]
struct Head {
    trace: Trace,
    tokens: Vec<u32>,
    logprobs: Vec<u32>,
}

impl Head {
    fn of(trace: &Trace) -> Self {
        let node = |n: &Node| Node {
            parent: n.parent,
            turn: n.turn,
            kind: n.kind,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            temperature: n.temperature,
            versions: n.versions.clone(),
            format: n.format.clone(),
            routes: n.routes.clone(),
            messages: n.messages.clone(),
            tools: n.tools.clone(),
            finish: n.finish.clone(),
            process_reward: n.process_reward,
            state_hash: n.state_hash,
            branch: n.branch,
        };
        Self {
            trace: Trace {
                format_version: trace.format_version,
                episode: trace.episode.clone(),
                group: trace.group.clone(),
                task: trace.task.clone(),
                task_kind: trace.task_kind.clone(),
                origin: trace.origin.clone(),
                provenance: trace.provenance.clone(),
                nodes: trace.nodes.iter().map(node).collect(),
                outcome: trace.outcome.clone(),
                end: trace.end.clone(),
                timing: trace.timing,
                ignored: trace.ignored.clone(),
            },
            tokens: trace.nodes.iter().map(|n| n.tokens.len() as u32).collect(),
            logprobs: trace
                .nodes
                .iter()
                .map(|n| n.logprobs.len() as u32)
                .collect(),
        }
    }
}

/// Appends a column: the highest byte of all numbers, then the next byte of all numbers, and so on.
fn put_column(out: &mut Vec<u8>, numbers: &[u32]) {
    for shift in [24, 16, 8, 0] {
        out.extend(numbers.iter().map(|n| (n >> shift) as u8));
    }
}

/// Decodes `count` numbers from the start of `bytes`, and removes them there.
fn take_column(bytes: &mut &[u8], count: usize) -> Option<Vec<u32>> {
    let (column, rest) = bytes.split_at_checked(count.checked_mul(4)?)?;
    *bytes = rest;
    let byte = |place: usize, i: usize| u32::from(column[place * count + i]);
    let number = |i| byte(0, i) << 24 | byte(1, i) << 16 | byte(2, i) << 8 | byte(3, i);
    Some((0..count).map(number).collect())
}

/// Encodes a trace, in columns if that is smaller.
///
/// # Errors
/// Same as [`codec::encode`].
pub(crate) fn encode(trace: &Trace, compress: bool) -> Result<Encoded, RecordError> {
    if compress {
        let packed = encode_columns(trace)?;
        if packed.bytes.len() < packed.raw_len as usize {
            return Ok(packed);
        }
    }
    codec::encode(trace, false)
}

/// Decodes a trace of any codec.
///
/// # Errors
/// Same as [`codec::decode`].
pub(crate) fn decode(codec: u8, raw_len: u32, bytes: &[u8]) -> Result<Trace, RecordError> {
    match codec {
        c if c == Codec::Columns as u8 => decode_columns(raw_len, bytes),
        _ => codec::decode(codec, raw_len, bytes),
    }
}

/// A trace in columns.
fn encode_columns(trace: &Trace) -> Result<Encoded, RecordError> {
    let head = rmp_serde::to_vec_named(&Head::of(trace))?;
    let numbers = |of: fn(&Node) -> usize| trace.nodes.iter().map(of).sum::<usize>();
    let count = numbers(|n| n.tokens.len()) + numbers(|n| n.logprobs.len());
    let raw_len = 4 + head.len() + 4 * count;
    let raw_len = u32::try_from(raw_len).map_err(|_| RecordError::Bytes("larger than 4 GiB"))?;
    let mut raw = Vec::with_capacity(raw_len as usize);
    raw.extend((head.len() as u32).to_le_bytes());
    raw.extend(head);
    let tokens = trace.nodes.iter().flat_map(|n| &n.tokens).copied();
    put_column(&mut raw, &tokens.collect::<Vec<u32>>());
    let logprobs = trace.nodes.iter().flat_map(|n| &n.logprobs);
    put_column(
        &mut raw,
        &logprobs.map(|p| p.to_bits()).collect::<Vec<u32>>(),
    );
    Ok(Encoded {
        codec: Codec::Columns,
        raw_len,
        bytes: compress(&raw)?,
    })
}

fn compress(raw: &[u8]) -> std::io::Result<Vec<u8>> {
    COMPRESSOR.with_borrow_mut(|slot| {
        let compressor = match slot {
            Some(compressor) => compressor,
            None => slot.insert(Compressor::with_prepared_dictionary(&ENCODER)?),
        };
        compressor.compress(raw)
    })
}

fn decompress(bytes: &[u8], raw_len: usize) -> std::io::Result<Vec<u8>> {
    DECOMPRESSOR.with_borrow_mut(|slot| {
        let decompressor = match slot {
            Some(decompressor) => decompressor,
            None => slot.insert(Decompressor::with_prepared_dictionary(&DECODER)?),
        };
        decompressor.decompress(bytes, raw_len)
    })
}

/// The inverse of [`encode_columns`].
fn decode_columns(raw_len: u32, bytes: &[u8]) -> Result<Trace, RecordError> {
    let raw = decompress(bytes, raw_len as usize)?;
    if raw.len() != raw_len as usize {
        return Err(RecordError::Length {
            found: raw.len(),
            expected: raw_len as usize,
        });
    }
    let short = || RecordError::Bytes("its columns end early");
    let (length, rest) = raw.split_first_chunk::<4>().ok_or_else(short)?;
    let length = u32::from_le_bytes(*length) as usize;
    let (head, mut columns) = rest.split_at_checked(length).ok_or_else(short)?;
    let head: Head = rmp_serde::from_slice(head)?;
    let mut trace = head.trace;
    let nodes = trace.nodes.len();
    if head.tokens.len() != nodes || head.logprobs.len() != nodes {
        let why = "its columns are of another number of nodes";
        return Err(RecordError::Bytes(why));
    }
    let sum = |counts: &[u32]| counts.iter().map(|&n| n as usize).sum();
    let tokens = take_column(&mut columns, sum(&head.tokens)).ok_or_else(short)?;
    let logprobs = take_column(&mut columns, sum(&head.logprobs)).ok_or_else(short)?;
    if !columns.is_empty() {
        return Err(RecordError::Trailing(columns.len()));
    }
    let (mut tokens, mut logprobs) = (tokens.into_iter(), logprobs.into_iter());
    let counts = head.tokens.iter().zip(&head.logprobs);
    for (node, (&ids, &probs)) in trace.nodes.iter_mut().zip(counts) {
        node.tokens = tokens.by_ref().take(ids as usize).collect();
        let bits = logprobs.by_ref().take(probs as usize);
        node.logprobs = bits.map(f32::from_bits).collect();
    }
    Ok(trace)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files on disk were written with these bytes.
    #[test]
    fn the_dictionary_is_part_of_the_format() {
        assert_eq!((HEADS.len(), crc32fast::hash(HEADS)), (1374, 0x9fc7d6b3));
    }
}
