//! Addresses of one server or of several.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whether a text begins as an address of HTTP or HTTPS.
pub(crate) fn is_http(url: &str) -> bool {
    url.starts_with("http://") || url.starts_with("https://")
}

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
