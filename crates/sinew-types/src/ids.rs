//! Identifiers as newtypes, so that no two of them can be confused.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Index of a token in a model's vocabulary.
pub type TokenId = u32;

macro_rules! string_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub String);

        impl $name {
            /// The id made from any text.
            pub fn new(text: impl Into<String>) -> Self {
                Self(text.into())
            }

            /// The id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

string_id!(
    /// One episode. It names the draw and the place in its group (`d00000042-e3`), so that it is
    /// stable across restarts and a second commit of the episode is recognized.
    EpisodeId
);
string_id!(
    /// The episodes of one task whose rewards are compared.
    GroupId
);
string_id!(
    /// One task of a taskset.
    TaskId
);

/// One generation request to an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RequestId(pub u64);

/// Number of the weights that sampled a token; the optimizer step that produced them.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct PolicyVersion(pub u64);

impl fmt::Display for PolicyVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.0)
    }
}

/// Origin of published weights, as 8 lowercase hexadecimal digits.
///
/// A trainer on a GPU does not repeat its bits: after a restart from a checkpoint, the same version number
/// can stand for other weights. Weights are the same only if both version and lineage are.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(try_from = "String", into = "String")]
pub struct Lineage(pub u32);

impl fmt::Display for Lineage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// A text that does not name published weights or their origin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {expected}")]
pub struct WeightsNameError {
    /// The text.
    pub text: String,
    /// The expected form in words.
    pub expected: &'static str,
}

impl FromStr for Lineage {
    type Err = WeightsNameError;

    fn from_str(text: &str) -> Result<Self, WeightsNameError> {
        let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        let whole = text.len() == 8 && text.bytes().all(digit);
        let bits = u32::from_str_radix(text, 16).ok().filter(|_| whole);
        bits.map(Self).ok_or_else(|| WeightsNameError {
            text: text.to_owned(),
            expected: "a lineage of 8 lowercase hexadecimal digits",
        })
    }
}

impl TryFrom<String> for Lineage {
    type Error = WeightsNameError;

    fn try_from(text: String) -> Result<Self, WeightsNameError> {
        text.parse()
    }
}

impl From<Lineage> for String {
    fn from(lineage: Lineage) -> Self {
        lineage.to_string()
    }
}

/// Published weights: version and lineage. The text is `v13-9f3c12ab`, as in labels of servers and names of
/// adapters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightsId {
    /// The optimizer step that produced them.
    pub version: PolicyVersion,
    /// The session of a trainer that produced them.
    pub lineage: Lineage,
}

impl WeightsId {
    /// Version and lineage together.
    pub fn new(version: PolicyVersion, lineage: Lineage) -> Self {
        Self { version, lineage }
    }

    /// Name of their folder, `v00000013-9f3c12ab`: names of one lineage sort by version.
    pub fn folder_name(&self) -> String {
        format!("v{:08}-{}", self.version.0, self.lineage)
    }
}

impl fmt::Display for WeightsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.version, self.lineage)
    }
}

impl FromStr for WeightsId {
    type Err = WeightsNameError;

    /// Reads a label or the name of a folder.
    fn from_str(text: &str) -> Result<Self, WeightsNameError> {
        let parsed = text.strip_prefix('v').and_then(|rest| {
            let (number, lineage) = rest.split_once('-')?;
            let digits = number.bytes().all(|b| b.is_ascii_digit());
            let version = number.parse().ok().filter(|_| digits)?;
            Some(Self::new(PolicyVersion(version), lineage.parse().ok()?))
        });
        parsed.ok_or_else(|| WeightsNameError {
            text: text.to_owned(),
            expected: "a name of weights such as v13-9f3c12ab",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_named_by_version_and_lineage() {
        let id = WeightsId::new(PolicyVersion(13), Lineage(0x9f3c_12ab));
        assert_eq!(id.to_string(), "v13-9f3c12ab");
        assert_eq!(id.folder_name(), "v00000013-9f3c12ab");
        for text in ["v13-9f3c12ab", "v00000013-9f3c12ab"] {
            assert_eq!(text.parse(), Ok(id));
        }
        for text in [
            "",
            "v13",
            "13-9f3c12ab",
            "v-9f3c12ab",
            "v+1-9f3c12ab",
            "v13-9F3C12AB",
            "v13-9f3c12a",
            "v13-9f3c12abc",
            "v13-+f3c12ab",
        ] {
            let error = text.parse::<WeightsId>().unwrap_err();
            assert!(error.to_string().contains("v13-9f3c12ab"), "{error}");
        }
        let json = serde_json::to_string(&id.lineage).unwrap();
        assert_eq!(json, "\"9f3c12ab\"");
        assert_eq!(serde_json::from_str::<Lineage>(&json).unwrap(), id.lineage);
        assert!(serde_json::from_str::<Lineage>("\"9f3c\"").is_err());
        assert_eq!(Lineage(7).to_string(), "00000007");
    }
}
