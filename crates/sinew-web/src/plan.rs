//! Steps of gold policies: actions on elements that are named by role and name, not by number.

use crate::tree::{Item, Place, Tree};
use serde_json::json;
use sinew_env::Action;
use sinew_types::ToolCall;

/// What a step does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// Clicks it.
    Click,
    /// Puts a text into it.
    Type(String),
    /// Chooses an option of it.
    Select(String),
    /// Ends the episode.
    Done,
}

/// One step of a gold policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// What it does.
    pub(crate) verb: Verb,
    /// Role of the element; empty: any.
    pub(crate) role: &'static str,
    /// Name of the element; empty: any.
    pub(crate) name: String,
    /// Which of several, from 0.
    pub(crate) nth: usize,
}

impl Step {
    /// A step on the first element of a role with a name.
    pub(crate) fn on(verb: Verb, role: &'static str, name: impl Into<String>) -> Self {
        let name = name.into();
        Self {
            verb,
            role,
            name,
            nth: 0,
        }
    }

    /// A click on the first element of a role with a name.
    pub(crate) fn click(role: &'static str, name: impl Into<String>) -> Self {
        Self::on(Verb::Click, role, name)
    }

    /// The end of the episode.
    pub(crate) fn done() -> Self {
        Self::on(Verb::Done, "", "")
    }

    /// The same on another element of that role and name.
    pub(crate) fn nth(self, nth: usize) -> Self {
        Self { nth, ..self }
    }

    /// Whether an element is of the step's role and name.
    fn fits(&self, item: &Item) -> bool {
        item.clickable
            && (self.role.is_empty() || item.role == self.role)
            && (self.name.is_empty() || item.name == self.name)
    }
}

/// A turn with one call.
fn calling(name: &str, arguments: serde_json::Value) -> Action {
    let call = ToolCall {
        id: "call-0".into(),
        name: name.into(),
        arguments,
    };
    Action {
        tool_calls: vec![call],
        ..Action::say("")
    }
}

/// The action of a step on a page, and whether it is the step itself: an element out of sight is scrolled to
/// first.
///
/// # Errors
/// If the page has no such element.
pub(crate) fn resolve(step: &Step, tree: &Tree) -> Result<(Action, bool), String> {
    if step.verb == Verb::Done {
        return Ok((calling("done", json!({})), true));
    }
    let found = tree.items.iter().filter(|i| step.fits(i)).nth(step.nth);
    let Some(item) = found else {
        return Err(format!(
            "there is no {} {:?} on this page:\n{}",
            step.role,
            step.name,
            tree.show(1000)
        ));
    };
    let scroll = |direction| Ok((calling("scroll", json!({ "direction": direction })), false));
    let number = match (item.number, item.place) {
        (_, Place::Above) => return scroll("up"),
        (None, _) => return scroll("down"),
        (Some(number), _) => number,
    };
    let action = match &step.verb {
        Verb::Click => calling("click", json!({ "element": number })),
        Verb::Type(text) => calling("type", json!({ "element": number, "text": text })),
        Verb::Select(option) => calling("select", json!({ "element": number, "option": option })),
        Verb::Done => calling("done", json!({})),
    };
    Ok((action, true))
}
