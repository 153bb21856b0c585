//! What a proof script may say.
//!
//! Commands of Coq begin with a capital letter, tactics do not. A script is taken if all of its sentences are
//! tactics, so that nothing in it can end the proof, add an axiom, load a file or print.

/// Bytes of a script at most.
pub(super) const MAX_SCRIPT: usize = 4000;
/// Commands that no script may name, wherever they stand.
const COMMANDS: [&str; 23] = [
    "Admitted",
    "Abort",
    "Axiom",
    "Axioms",
    "Parameter",
    "Parameters",
    "Conjecture",
    "Hypothesis",
    "Variable",
    "Variables",
    "Context",
    "Declare",
    "Require",
    "Import",
    "Export",
    "Redirect",
    "Drop",
    "Extraction",
    "Print",
    "Load",
    "Unset",
    "Notation",
    "Ltac",
];
/// Tactics that leave a proof open.
const OPEN: [&str; 3] = ["admit", "give_up", "shelve"];
/// Tactics that search for a proof by themselves.
const AUTOMATION: [&str; 24] = [
    "auto",
    "eauto",
    "tauto",
    "intuition",
    "firstorder",
    "trivial",
    "easy",
    "now",
    "done",
    "lia",
    "nia",
    "lra",
    "ring",
    "omega",
    "congruence",
    "repeat",
    "try",
    "first",
    "solve",
    "match",
    "lazymatch",
    "multimatch",
    "do",
    "btauto",
];

/// A script as it goes into the file: without `Proof.` and `Qed.` around it, which models write.
///
/// # Errors
/// What is not allowed, for the model.
pub(super) fn accept(script: &str, automation: bool) -> Result<String, String> {
    if script.len() > MAX_SCRIPT {
        return Err(format!(
            "the script has {} bytes; allowed: {MAX_SCRIPT}",
            script.len()
        ));
    }
    if script.contains('"') {
        return Err("a script has no text in quotation marks".into());
    }
    if let Some(c) = script
        .chars()
        .find(|c| c.is_control() && !c.is_whitespace())
    {
        return Err(format!("a script has no character {:#x}", u32::from(c)));
    }
    let plain = without_comments(script)?;
    let mut inside = plain.trim();
    inside = inside.strip_prefix("Proof.").unwrap_or(inside).trim();
    inside = inside.strip_suffix("Qed.").unwrap_or(inside).trim();
    if inside.is_empty() {
        return Err("the script is empty".into());
    }
    if !inside.ends_with(['.', '}']) {
        return Err("the last sentence has no period".into());
    }
    for word in words(inside) {
        if COMMANDS.contains(&word) || OPEN.contains(&word) {
            return Err(format!(
                "{word} is not allowed: a proof is complete and adds nothing"
            ));
        }
        if !automation && AUTOMATION.contains(&word) {
            return Err(format!(
                "{word} is not allowed here: give the steps of the proof"
            ));
        }
    }
    for sentence in sentences(inside) {
        let begin = sentence.trim_start_matches(|c: char| c.is_whitespace() || "-+*{}".contains(c));
        let tactic = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "([!".contains(c);
        if !begin.is_empty() && !begin.starts_with(tactic) {
            let shown: String = begin.chars().take(40).collect();
            return Err(format!(
                "{shown:?} is no tactic; Theorem, Proof and Qed are written for you"
            ));
        }
    }
    Ok(inside.to_owned())
}

/// Words of letters, digits, `_` and `'`.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == '\''))
        .filter(|word| !word.is_empty())
}

/// The text with a blank in place of each comment. Comments nest.
fn without_comments(script: &str) -> Result<String, String> {
    let (mut out, mut depth, mut rest) = (String::new(), 0usize, script);
    while let Some(c) = rest.chars().next() {
        if rest.starts_with("(*") {
            depth += 1;
            rest = &rest[2..];
        } else if rest.starts_with("*)") && depth > 0 {
            depth -= 1;
            out.push(' ');
            rest = &rest[2..];
        } else {
            if depth == 0 {
                out.push(c);
            }
            rest = &rest[c.len_utf8()..];
        }
    }
    match depth {
        0 => Ok(out),
        _ => Err("a comment is not closed".into()),
    }
}

/// Sentences: they end with a period before white space, or at the end. Braces are sentences, too.
fn sentences(text: &str) -> Vec<&str> {
    let (mut out, mut start) = (Vec::new(), 0);
    for (at, _) in text.match_indices('.') {
        let end = at + 1;
        if text[end..].chars().next().is_none_or(char::is_whitespace) {
            out.push(&text[start..end]);
            start = end;
        }
    }
    out.push(&text[start..]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn proofs_are_taken_with_and_without_their_frame() {
        let plain = "intros a h.\nsplit.\n- exact h.\n- { apply (f a); [ exact h | ]. }";
        assert_eq!(accept(plain, false).unwrap(), plain);
        assert_eq!(
            accept(&format!("Proof.\n{plain}\nQed."), false).unwrap(),
            plain
        );
        assert_eq!(
            accept("(* a (* b *) *) exact h.", false).unwrap(),
            "exact h."
        );
    }

    #[test]
    fn commands_and_open_proofs_are_refused() {
        let cheats = [
            "Admitted.",
            "intros. Admitted.",
            "admit.",
            "intros; give_up.",
            "exact h. Qed. Axiom magic : False. Theorem goal2 : True.",
            "exact I. Qed. Module M. Theorem goal : True.",
            "Proof. Abort. Definition goal := I.",
            "idtac \"Closed under the global context\".",
            "- Fail exact h.",
            "{ Set Universe Polymorphism. }",
            "#[local] Hint Resolve h.",
            "(* hidden *) Redirect x Print nat.",
            "exact h",
            "(* open",
            "",
            "Proof. Qed.",
        ];
        for cheat in cheats {
            assert!(accept(cheat, true).is_err(), "{cheat}");
        }
        assert!(accept("auto.", true).is_ok());
        assert!(accept("intros; auto.", false).unwrap_err().contains("auto"));
        assert!(accept(&"a".repeat(MAX_SCRIPT + 1), true).is_err());
    }

    proptest! {
        #[test]
        fn no_accepted_script_has_a_sentence_of_a_command(script in "[A-Za-z .*(){}\\-#;\n]{0,60}") {
            if let Ok(taken) = accept(&script, true) {
                let marks = [' ', '\n', '-', '+', '*', '{', '}'];
                for sentence in taken.split(". ").map(|s| s.trim_start_matches(marks)) {
                    prop_assert!(!sentence.starts_with(|c: char| c.is_uppercase() || c == '#'), "{}", taken);
                }
            }
        }
    }
}
