//! Families of pages that can be played by their accessibility tree, each with a gold policy.

use crate::plan::{Step, Verb};

/// Steps for a task in words.
type Gold = fn(&str) -> Option<Vec<Step>>;

/// A family of pages.
#[derive(Clone, Copy)]
pub struct Family {
    /// Name of the page's file, without its ending.
    pub name: &'static str,
    /// Steps that solve a task in words.
    gold: Gold,
}

impl std::fmt::Debug for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl Family {
    /// The family of a name.
    pub(super) fn named(name: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|f| f.name == name)
    }

    /// Steps that solve a task in words; `None` if the words are of no known form.
    pub(super) fn gold(&self, task: &str) -> Option<Vec<Step>> {
        (self.gold)(task)
    }
}

/// A family with its gold policy.
const fn family(name: &'static str, gold: Gold) -> Family {
    Family { name, gold }
}

/// All families.
pub static FAMILIES: [Family; 13] = [
    family("click-button", |t| {
        Some(vec![Step::click("button", quoted(t, 0)?)])
    }),
    family("click-button-sequence", |_| {
        Some(vec![
            Step::click("button", "ONE"),
            Step::click("button", "TWO"),
        ])
    }),
    family("click-checkboxes", checkboxes),
    family("click-dialog", |_| {
        Some(vec![Step::click("button", "Close")])
    }),
    family("click-dialog-2", |t| {
        let name = quoted(t, 0)?;
        let name = if name == "x" { "Close" } else { name };
        Some(vec![Step::click("button", name)])
    }),
    family("click-link", |t| {
        Some(vec![Step::click("text", quoted(t, 0)?)])
    }),
    family("click-option", |t| {
        let name = t
            .strip_prefix("Select ")?
            .strip_suffix(" and click Submit.")?;
        Some(vec![
            Step::click("radio", name),
            Step::click("button", "Submit"),
        ])
    }),
    family("click-tab", |t| {
        let name = t.strip_prefix("Click on ")?.strip_suffix('.')?;
        Some(vec![Step::click("tab", name)])
    }),
    family("choose-list", |t| {
        let name = t
            .strip_prefix("Select ")?
            .strip_suffix(" from the list and click Submit.")?;
        let select = Step::on(Verb::Select(name.into()), "combobox", "");
        Some(vec![select, Step::click("button", "Submit")])
    }),
    family("enter-password", |t| {
        let word = quoted(t, 0)?;
        let fill = |name| Step::on(Verb::Type(word.into()), "textbox", "").nth(name);
        Some(vec![fill(0), fill(1), Step::click("button", "Submit")])
    }),
    family("enter-text", |t| {
        let word = Verb::Type(quoted(t, 0)?.into());
        Some(vec![
            Step::on(word, "textbox", ""),
            Step::click("button", "Submit"),
        ])
    }),
    family("focus-text", |_| Some(vec![Step::click("textbox", "")])),
    family("login-user", |t| {
        let fill = |n| Some(Step::on(Verb::Type(quoted(t, n)?.into()), "textbox", "").nth(n));
        Some(vec![fill(0)?, fill(1)?, Step::click("button", "Login")])
    }),
];

/// The text in the quotation marks number `nth`, from 0.
fn quoted(task: &str, nth: usize) -> Option<&str> {
    task.split('"').nth(2 * nth + 1)
}

/// Boxes by name, then the button.
fn checkboxes(task: &str) -> Option<Vec<Step>> {
    let names = task
        .strip_prefix("Select ")?
        .strip_suffix(" and click Submit.")?;
    let names = names.split(", ").filter(|n| *n != "nothing");
    let mut steps: Vec<Step> = names.map(|n| Step::click("checkbox", n)).collect();
    steps.push(Step::click("button", "Submit"));
    Some(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gold_steps_follow_from_the_words() {
        let login = Family::named("login-user").unwrap();
        let task = "Enter the username \"ann\" and the password \"x1\" into the text fields and press login.";
        let steps = login.gold(task).unwrap();
        assert_eq!(steps[1].verb, Verb::Type("x1".into()));
        assert_eq!(steps[1].nth, 1);
        let boxes = Family::named("click-checkboxes").unwrap();
        assert_eq!(
            boxes
                .gold("Select nothing and click Submit.")
                .unwrap()
                .len(),
            1
        );
        assert_eq!(boxes.gold("Do something else."), None);
    }
}
