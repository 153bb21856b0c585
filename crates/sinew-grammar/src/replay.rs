//! Recomputes the masks of a trace.

use crate::{GrammarError, Grammars, format_hash};
use sinew_types::{Enforced, Node, NodeFormat, RowMasks};

/// Reason why the masks of a node cannot be recomputed. Its tokens must not be trained on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// The recorded implementation, environment or format differs from the current one.
    #[error("{field} was {recorded:?} at sampling time and is {here:?} now")]
    Differs {
        field: &'static str,
        recorded: String,
        here: String,
    },
    /// An external engine enforced the format and reported no masks.
    #[error("the masks are unknown: {engine} enforced the format itself")]
    Outside { engine: String },
    /// A recorded column has the wrong length.
    #[error("{field} has {actual} entries for {tokens} tokens")]
    Length {
        field: &'static str,
        actual: usize,
        tokens: usize,
    },
    /// The recomputed mask differs from the recorded one.
    #[error(
        "token {index}: the mask allows {allowed} tokens (hash {hash:016x}), \
         recorded are {recorded} ({recorded_hash:016x})"
    )]
    Mask {
        index: usize,
        allowed: u32,
        hash: u64,
        recorded: u32,
        recorded_hash: u64,
    },
    /// The matcher failed at a token.
    #[error("token {index}: {error}")]
    Grammar { index: usize, error: GrammarError },
}

/// Recomputes the masks of a sampled node, one row per token. Returns `None` if the node was sampled from
/// the full softmax. A token whose mask allows one token only has no mask and is not trained on.
///
/// # Errors
/// Returns an error if the masks are unknown or differ from the recorded ones.
pub fn replay(grammars: &dyn Grammars, node: &Node) -> Result<Option<RowMasks>, ReplayError> {
    let Some(format) = &node.format else {
        return Ok(None);
    };
    match &format.law.enforced {
        Enforced::Advice => Ok(None),
        Enforced::Outside { engine } => Err(ReplayError::Outside {
            engine: engine.clone(),
        }),
        Enforced::Masks {
            implementation,
            environment,
            format: hash,
        } => {
            let here = format_hash(&format.law.format);
            same("implementation", implementation, grammars.implementation())?;
            same("environment", environment, grammars.environment())?;
            same("format", hash, &here)?;
            masks(grammars, node, format).map(Some)
        }
    }
}

/// Compares a recorded identifier with the current one.
fn same(field: &'static str, recorded: &str, here: &str) -> Result<(), ReplayError> {
    if recorded == here {
        Ok(())
    } else {
        Err(ReplayError::Differs {
            field,
            recorded: recorded.to_owned(),
            here: here.to_owned(),
        })
    }
}

fn masks(
    grammars: &dyn Grammars,
    node: &Node,
    format: &NodeFormat,
) -> Result<RowMasks, ReplayError> {
    let tokens = node.tokens.len();
    let columns = [
        ("allowed", format.allowed.len()),
        ("masks", format.masks.len()),
    ];
    if let Some((field, actual)) = columns.into_iter().find(|c| c.1 != tokens) {
        return Err(ReplayError::Length {
            field,
            actual,
            tokens,
        });
    }
    let at = |index: usize| move |error: GrammarError| ReplayError::Grammar { index, error };
    let mut matcher = grammars.start(&format.law.format).map_err(at(0))?;
    let mut made = Vec::with_capacity(tokens);
    for (index, &token) in node.tokens.iter().enumerate() {
        let mask = matcher.mask().map_err(at(index))?;
        let (recorded, recorded_hash) = (format.allowed[index], format.masks[index]);
        if (mask.allowed(), mask.hash()) != (recorded, recorded_hash) {
            return Err(ReplayError::Mask {
                index,
                allowed: mask.allowed(),
                hash: mask.hash(),
                recorded,
                recorded_hash,
            });
        }
        // Fails if the mask forbids the token.
        matcher.advance(token).map_err(at(index))?;
        made.push((mask.allowed() > 1).then_some(mask));
    }
    let words = grammars.columns().div_ceil(32);
    let each = made.iter().map(|m| m.as_deref().map(crate::Mask::words));
    Ok(RowMasks::gather(words, each))
}
