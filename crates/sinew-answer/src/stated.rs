//! The part of an answer that it states as its result.

use crate::notation::braces;
use crate::pattern;

/// Mark of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// `<answer>...</answer>`.
    Tag,
    /// `\boxed{...}`.
    Box,
    /// `#### ...` at the end, as GSM8K writes it.
    Hash,
    /// The key `answer` of an answer that is a JSON object.
    Key,
    /// A phrase such as "the answer is", in many languages.
    Phrase,
}

/// A stated result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stated<'a> {
    /// The stated result; after a phrase, all text to the end.
    pub text: &'a str,
    pub mark: Mark,
}

pattern!(HASH, r"(?m)^\s*####\s+([^\n#]*\d[^\n#]*|[A-Z])\s*$");
pattern!(
    KEY,
    r#"^\s*(?:```(?:json)?\s*)?\{[\s\S]*"(?:final_answer|final answer|answer|result|solution)"\s*:\s*("(?:[^"\\]|\\.)*"|[-+\d.eE]+)[\s\S]*\}\s*(?:```)?\s*$"#
);

/// Phrases before an answer. Words for "result" are none: results of steps have them as well.
const PHRASES: &[&str] = &[
    // English.
    r"\banswer(?: choice| option)?(?: to| for| of)?(?: [^\n.:?!=]{0,60})?\**\s*(?:\bis\b|\bare\b|\bwas\b|\bwould be\b|\bshould be\b|\bmust be\b|\bequals\b)\s*:?",
    r"\b(?:answer|ans|correct (?:choice|option))(?: choice| option)?\s*\**\s*[:：=]\s*",
    r"\b(?:correct|right|best) (?:choice|option)\s*\**\s*\bis\b\s*:?",
    r"(?m:^[\s#*]*(?:the )?final answer[\s*]*$)",
    // Chinese.
    r"(?:答案|正确选项|正確選項)(?:应该?|應該?)?(?:是|为|為|：|:|＝|=)+",
    // Japanese, Korean.
    r"(?:答え|解答|正解|回答)(?:は|：|:|が)+、?",
    r"(?:정답|답)(?:은|는|이|:|：)+",
    // Romance languages.
    r"\b(?:respuesta|resposta|risposta|réponse)(?: finale?| correcta?| correta| corretta| correcte?)?\**\s*(?:\bes\b|\bé\b|è|\best\b|\s?[:=])\s*:?",
    // Germanic languages.
    r"\b(?:antwort|antwoord|svaret|svar)\**\s*(?:\bist\b|\blautet\b|\bis\b|\bär\b|\ber\b|[:=])\s*:?",
    // Slavic languages.
    r"\b(?:ответ|відповідь|odpowiedź|odpověď|одговор|отговор)\**\s*(?:\bравен\b|\bto\b|\bje\b|[:=—–-])\s*",
    // Arabic, Persian, Hebrew, Turkish, Indonesian, Vietnamese, Hindi, Bengali, Thai.
    r"(?:الإجابة|الجواب|پاسخ|جواب|התשובה)(?: الصحيحة| النهائية| نهایی| הנכונה| הסופית)?\**\s*(?: هي| هو| היא| הוא|[:：])?\s*",
    r"\b(?:cevap|yanıt|jawaban|jawabannya|jawaban akhir)\**\s*(?: adalah|[:=])?\s*",
    r"(?:đáp án|đáp số)(?: cuối cùng| đúng)?\**\s*(?: là|[:=])\s*",
    r"(?:उत्तर|जवाब|উত্তর|คำตอบ)(?: अंतिम)?\**\s*(?:है|हैं|হল|হলো|คือ|[:：=])*\s*",
    // Greek.
    r"απάντηση\**\s*(?: είναι|[:=])\s*",
];

static PHRASE: crate::Pattern =
    crate::Pattern::new(|| regex::Regex::new(&format!("(?i){}", PHRASES.join("|"))).ok());

/// The result that an answer states, and how. A tag counts before a box, and these before phrases; of one
/// kind the last.
pub fn stated(answer: &str) -> Option<Stated<'_>> {
    if let Some(inside) = tag(answer) {
        return Some(stated_in(inside).unwrap_or(Stated {
            text: inside,
            mark: Mark::Tag,
        }));
    }
    stated_in(answer)
}

fn stated_in(answer: &str) -> Option<Stated<'_>> {
    let marked = |text, mark| Stated { text, mark };
    if let Some(text) = boxed(answer) {
        return Some(marked(text, Mark::Box));
    }
    if let Some(key) = KEY.captures(answer).and_then(|c| c.get(1)) {
        let text = &answer[key.range()];
        return Some(marked(text.trim_matches('"'), Mark::Key));
    }
    let hash = HASH.all(answer).filter_map(|c| c.get(1)).last();
    if let Some(hash) = hash.filter(|h| answer[h.end()..].trim().is_empty()) {
        return Some(marked(&answer[hash.range()], Mark::Hash));
    }
    let phrases = PHRASE.get()?.find_iter(answer);
    let last = phrases.filter(|m| has_value(&answer[m.end()..])).last()?;
    Some(marked(&answer[last.end()..], Mark::Phrase))
}

/// Whether something follows that may be a result.
fn has_value(after: &str) -> bool {
    after.chars().any(char::is_alphanumeric)
}

/// The content of the last `<answer>`. An answer that was cut may lack its closing tag.
pub(crate) fn tag(answer: &str) -> Option<&str> {
    let at = answer.rfind("<answer>")? + "<answer>".len();
    let rest = &answer[at..];
    Some(
        rest.split_once("</answer>")
            .map_or(rest, |(inside, _)| inside)
            .trim(),
    )
}

/// The content of the last `\boxed{}` that is closed.
fn boxed(answer: &str) -> Option<&str> {
    let found = answer.rmatch_indices("boxed").find_map(|(at, word)| {
        let before = &answer[..at];
        let rest = &answer[at + word.len()..];
        let begins = before.ends_with('\\') || before.ends_with("\\f");
        let open = rest.trim_start();
        if begins && open.starts_with('{') {
            braces(open).map(|end| &open[1..end])
        } else {
            let one = open
                .chars()
                .next()
                .filter(|c| begins && c.is_alphanumeric())?;
            open.get(..one.len_utf8())
        }
    });
    found.map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phrase_is_a_pattern() {
        assert!(PHRASE.get().is_some() && HASH.get().is_some() && KEY.get().is_some());
    }

    #[test]
    fn results_are_found_by_their_marks() {
        for (answer, text, mark) in [
            (r"So \boxed{\frac{1}{2}}.", r"\frac{1}{2}", Mark::Box),
            ("<answer> 4 </answer>", "4", Mark::Tag),
            (r"<answer>\boxed{4}</answer>", "4", Mark::Box),
            ("a\n#### 18", "18", Mark::Hash),
            (r#"{"why": "x", "answer": "B"}"#, "B", Mark::Key),
            ("The answer is 4", "4", Mark::Phrase),
            ("**Final Answer:** 4", "** 4", Mark::Phrase),
            ("## Final Answer\n\n4", "\n\n4", Mark::Phrase),
            ("答案是4", "4", Mark::Phrase),
        ] {
            let found = stated(answer).unwrap();
            assert_eq!(
                (found.text.trim(), found.mark),
                (text.trim(), mark),
                "{answer}"
            );
        }
        for none in ["4", "To answer this, think.", "", r"\boxed{4", "## Step"] {
            assert_eq!(stated(none), None, "{none}");
        }
    }
}
