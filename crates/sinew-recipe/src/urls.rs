//! Addresses of one server or of several.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An address, or several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "an address, or a list of addresses")]
pub enum Urls {
    One(String),
    Several(Vec<String>),
}

impl Urls {
    /// Returns all addresses.
    pub fn all(&self) -> &[String] {
        match self {
            Self::One(url) => std::slice::from_ref(url),
            Self::Several(urls) => urls,
        }
    }
}
