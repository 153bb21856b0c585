//! Facets of episodes, by which they can be filtered in addition to the columns of their row: environment,
//! versions, last turn, content.
//!
//! Facets are in a separate table, so that the rows of episodes stay short.

use crate::checksums;
use crate::error::StoreError;
use crate::ledger;
use crate::sqlite_int::signed;
use rusqlite::Transaction;
use rusqlite::types::ValueRef;
use sinew_types::{TokenKind, Trace};

/// Facets of one episode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facets {
    /// Name of the environment, see [`Trace::environment`].
    pub(crate) env: String,
    /// Version of the environment, if known.
    pub(crate) env_version: Option<String>,
    /// Oldest and newest policy version of the sampled tokens; `None` without any.
    pub(crate) versions: Option<(u64, u64)>,
    /// Number of the last sampled turn, from 1; 0 without any.
    pub(crate) last_turn: u32,
    /// Hash of the content, see [`content`].
    pub(crate) content: [u8; 16],
}

impl Facets {
    /// Returns the facets of a trace.
    pub(crate) fn of(trace: &Trace) -> Self {
        let sampled = trace.nodes.iter().filter(|n| n.kind == TokenKind::Sampled);
        let environment = trace.provenance.environment.as_ref();
        let versions = trace.oldest_version().zip(trace.newest_version());
        Self {
            env: trace.environment().to_owned(),
            env_version: environment.map(|e| e.version.clone()),
            versions: versions.map(|(oldest, newest)| (oldest.0, newest.0)),
            last_turn: sampled.map(|n| n.turn).max().unwrap_or(0),
            content: content(trace),
        }
    }
}

/// Returns the content hash of an episode: its task, the kinds, parents and tokens of its nodes, and the
/// messages of nodes without tokens. Sampling settings, times, log-probabilities and rewards are not
/// included.
pub(crate) fn content(trace: &Trace) -> [u8; 16] {
    let mut hash = blake3::Hasher::new();
    let mut bytes = Vec::new();
    let mut put = |part: &[u8]| {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(part);
    };
    put(trace.task.as_str().as_bytes());
    for node in &trace.nodes {
        put(&[match node.kind {
            TokenKind::Prompt => 0,
            TokenKind::Sampled => 1,
            TokenKind::Forced => 2,
            TokenKind::Observation => 3,
        }]);
        put(&node.parent.to_le_bytes());
        let ids: Vec<u8> = node.tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        put(&ids);
        // Tokens have the content of their messages, if there are any; an outside program's may have none.
        if node.tokens.is_empty() {
            for message in &node.messages {
                put(&serde_json::to_vec(message).unwrap_or_default());
            }
        }
    }
    hash.update(&bytes);
    let mut short = [0; 16];
    short.copy_from_slice(&hash.finalize().as_bytes()[..16]);
    short
}

/// Inserts the facets of an episode, unless they exist.
pub(crate) fn insert(tx: &Transaction<'_>, seq: i64, facets: &Facets) -> Result<(), StoreError> {
    let version = |v: Option<u64>| match v {
        Some(v) => signed("version", v).map(ValueRef::Integer),
        None => Ok(ValueRef::Null),
    };
    let values = [
        ValueRef::Integer(seq),
        ValueRef::from(facets.env.as_str()),
        facets
            .env_version
            .as_deref()
            .map_or(ValueRef::Null, ValueRef::from),
        version(facets.versions.map(|v| v.0))?,
        version(facets.versions.map(|v| v.1))?,
        ValueRef::Integer(facets.last_turn.into()),
        ValueRef::Blob(&facets.content),
    ];
    checksums::insert(
        tx,
        "INSERT OR IGNORE INTO facets
            (seq, env, env_version, first_version, last_version, last_turn, content, sum)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        &values,
    )
    .map(drop)
}

/// Deletes the facets of removed episodes.
pub(crate) fn prune(tx: &Transaction<'_>) -> Result<(), StoreError> {
    ledger::prune_gone(tx, "facets", "seq")
}
