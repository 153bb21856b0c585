//! One row of `sinew doctor`.

use serde_json::{Value, json};

/// The state of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Ok,
    /// A first run works without it.
    Warn,
    /// A first run needs it.
    Fail,
}

impl Mark {
    /// The word before a row.
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
        }
    }
}

/// One thing that was tried.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) mark: Mark,
    pub(super) name: String,
    /// Finding of the probe.
    pub(super) detail: String,
    /// The command or the key that helps; nothing where all is well.
    pub(super) hint: Option<String>,
}

impl Row {
    /// Something that works.
    pub(super) fn ok(name: &str, detail: impl Into<String>) -> Self {
        Self {
            mark: Mark::Ok,
            name: name.into(),
            detail: detail.into(),
            hint: None,
        }
    }

    /// Something that does not work, or not as well as it could.
    pub(super) fn new(
        mark: Mark,
        name: &str,
        detail: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        Self {
            mark,
            hint: Some(hint.into()),
            ..Self::ok(name, detail)
        }
    }

    /// An error as a row. Its own hint, on a line of its own, comes before `hint`.
    pub(super) fn failed(mark: Mark, name: &str, error: &str, hint: &str) -> Self {
        let (detail, hint) = error.split_once("\n  hint: ").unwrap_or((error, hint));
        Self::new(mark, name, detail, hint)
    }

    /// The row as an object, with the group that it is in.
    pub(super) fn json(&self, group: &str) -> Value {
        json!({
            "group": group,
            "check": self.name,
            "state": self.mark.text().to_lowercase(),
            "ok": self.mark == Mark::Ok,
            "detail": self.detail,
            "hint": self.hint,
        })
    }
}
