//! The option that an answer takes.

use crate::notation::{is_unspaced, joins, plain};
use crate::pattern;
use crate::stated::{Mark, stated};

/// An option, and what else may be meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The letter, as a capital. `None`: no option, or more than one without a mark of the right one.
    pub letter: Option<char>,
    /// Letters among which the text does not decide.
    pub maybe: Vec<char>,
}

pattern!(ALONE, r"(?m)^[\s>*_`(\[【（]*(\p{L})[\s*_`\])】）.。:：]*$");
pattern!(
    HEAD,
    r"^[\s>*_`$]*[(\[（【]?(\p{L})(?:[)\]）】]|\*\*|[.:：、．]\s|[.:：]?\s*$|\s+[—–-]\s|,\s|\n)"
);
pattern!(
    BOLD,
    r"\*\*\s*[(\[（【]?(\p{L})(?:[)\]）】.:：、][^*\n]*|\s+[^*\n]{0,80})?\*\*"
);
pattern!(
    RIGHT,
    r"(?i)(?:\boption|\bchoice|\banswer|\bstatement|选项|選項|\bопция|\bopción|\boption)?\s*[*(\[（]*\b?(\p{L})[*)\]）]*(?:\b|)\s*(?:is|are|seems|appears to be|must be|would be|是|为|ist|est|es|é|è)\s*(?:the|a|de|la|le|die|der|das|el|o|a|la)?\s*(?:best |most |only |clearly |indeed )*(?:correct|right|answer|true one|best|正确|正確|对的|對的|richtig|correcta?|juste|exacte|certa|corretta|bonne)"
);
pattern!(CHOSEN, r"(?:选择|選擇|选|選)[:：]?\s*[(（]?(\p{Lu})");
pattern!(
    TAKE,
    r"(?i)\b(?:choose|choosing|pick|select|go with|going with|opt for|settle on|i'd say|i would say)\b[^\n.]{0,20}?[\s*(\[（]+(\p{L})(?:[*)\]）.,;:!]|\s|$)"
);
pattern!(
    NOT_BEFORE,
    r"(?i)(?:\bnot|n't|n’t|\brule[sd]? out|\beliminat\w+|\bexclud\w+|\brather than|\binstead of|\bunlike|\bthan|\bover|\bexcept|排除|不选|不選|不是|ไม่ใช่)\s*(?:option|choice|answer|选项|選項)?[\s*(\[（]*$"
);
pattern!(
    NOT_AFTER,
    r"(?i)^[*)\]）]*\s*(?:(?:is|are|was|seems|looks|can be|must be|would be)?\s*(?:also )?(?:clearly |obviously |definitely |simply |just )?(?:wrong|incorrect|false|not |n't|ruled out|eliminated|excluded|invalid|impossible|too |irrelevant|out\b|close|tempting|a distractor|a trap)|(?:isn't|isn’t|can't|can’t|cannot|doesn't|doesn’t|does not|fails|contradicts|错|錯|不|是错|是錯|ist falsch|ist nicht|n'est pas|no es|não é|неверн|не ))"
);

/// The option of an answer. A box, a tag or a phrase states it; else it stands at the start, on a separate
/// line, in bold, or is called right; else it is the only letter that is not called wrong.
pub fn choice(answer: &str) -> Choice {
    let of = |letter: Option<char>| {
        letter.map(|letter| Choice {
            letter: Some(letter),
            maybe: Vec::new(),
        })
    };
    let found = stated(answer).and_then(|found| {
        let text = plain(found.text);
        match found.mark {
            Mark::Phrase => phrase(&text),
            _ => of(letters(&text).into_iter().next()),
        }
    });
    if let Some(found) = found {
        return found;
    }
    let text = plain(answer);
    let capital = |c: &regex::Captures<'_>| option(c.get(1)?.as_str());
    let head = HEAD
        .captures(&text)
        .filter(|c| !refused(&text, c))
        .and_then(|c| capital(&c));
    let right = RIGHT
        .all(&text)
        .chain(TAKE.all(&text))
        .chain(CHOSEN.all(&text))
        .filter(|c| {
            // The letter itself is a capital: the patterns take words in any case.
            c.get(1).is_some_and(|m| {
                m.as_str().chars().all(char::is_uppercase) && is_free(&text, m.range())
            }) && !refused(&text, c)
        });
    let right = right.filter_map(|c| capital(&c)).last();
    let alone = ALONE.all(&text).filter_map(|c| capital(&c)).last();
    let bold: Vec<char> = BOLD
        .all(&text)
        .filter(|c| !refused(&text, c))
        .filter_map(|c| capital(&c))
        .collect();
    let bold = bold
        .first()
        .copied()
        .filter(|first| bold.iter().all(|b| b == first));
    let marked = right.or(alone).or(head).or(bold);
    of(marked).unwrap_or_else(|| open(letters(&text)))
}

pattern!(
    AT_ONCE,
    r"^(?:option|choice|选项|選項|вариант|opción|opção)?[^\p{L}\d]*(\p{L})"
);

/// The option behind a phrase: the first letter, or the only one of the line. Two options joined by "or"
/// are none.
fn phrase(text: &str) -> Option<Choice> {
    let line = text.trim_start_matches(|c: char| c.is_whitespace() || "*_:：`".contains(c));
    let line = line.lines().next().unwrap_or_default();
    if HEDGE.is_match(line) {
        return Some(Choice {
            letter: None,
            maybe: Vec::new(),
        });
    }
    let all = letters(line);
    let at_once = AT_ONCE.captures(line).and_then(|c| c.get(1)).filter(|m| {
        is_free(line, m.range())
            && !is_refused(line, m.range())
            && all.first() == option(m.as_str()).as_ref()
    });
    match at_once {
        Some(_) => all.first().map(|first| Choice {
            letter: Some(*first),
            maybe: Vec::new(),
        }),
        None => Some(open(all)).filter(|c| c.letter.is_some()),
    }
}

pattern!(
    HEDGE,
    r"^[^\p{L}]*(?:option |choice |either )?[*(\[]*\p{L}[*)\]]*\s*(?:or|and|/|,|oder|ou|o|或|和|、|または|или)\s*(?:option |choice )?[*(\[]*\p{L}[*)\]]*(?:[^\p{L}]|$)"
);

/// One letter, or the letters among which the text does not decide.
fn open(letters: Vec<char>) -> Choice {
    let mut distinct = letters;
    distinct.sort_unstable();
    distinct.dedup();
    match distinct.as_slice() {
        [one] => Choice {
            letter: Some(*one),
            maybe: Vec::new(),
        },
        _ => Choice {
            letter: None,
            maybe: distinct,
        },
    }
}

/// Whether the words around a match call its letter wrong.
fn refused(text: &str, found: &regex::Captures<'_>) -> bool {
    found.get(1).is_some_and(|m| is_refused(text, m.range()))
}

fn is_refused(text: &str, letter: std::ops::Range<usize>) -> bool {
    NOT_BEFORE.is_match(&text[..letter.start]) || NOT_AFTER.is_match(&text[letter.end..])
}

/// A text of one letter as an option: a capital, or a character of a script without capitals.
pub fn option(letter: &str) -> Option<char> {
    let letter = plain(letter);
    let mut letters = letter
        .trim()
        .trim_matches(['(', ')', '.', ':', '"'])
        .chars();
    let c = letters.next().filter(|c| c.is_alphabetic())?;
    let mut upper = c.to_uppercase();
    let one = upper.next()?;
    (letters.next().is_none() && upper.next().is_none()).then_some(one)
}

/// Whether the neighbours of a letter are neither letters of its kind, nor digits or apostrophes.
fn is_free(text: &str, at: std::ops::Range<usize>) -> bool {
    let stops = |c: char| joins(c) || c.is_numeric() || "'_\\-+".contains(c);
    let before = text[..at.start].chars().next_back();
    let after = text[at.end..].chars().next();
    !before.is_some_and(stops) && !after.is_some_and(stops)
}

/// Options of a plain text in order, without those that are called wrong: single capitals. "A" and "I" before
/// a word are an article and a pronoun.
fn letters(text: &str) -> Vec<char> {
    let boxed = text
        .trim()
        .trim_matches(|c: char| "*_`$.()[]{}（）【】\"' ".contains(c));
    let mut one = boxed.chars();
    if let (Some(c), None) = (one.next(), one.next())
        && c.is_alphabetic()
    {
        return option(boxed).into_iter().collect();
    }
    let all = text.char_indices().filter(|(at, c)| {
        let range = *at..at + c.len_utf8();
        c.is_uppercase()
            && is_free(text, range.clone())
            && !is_word(text, *c, range.end)
            && !is_refused(text, range)
    });
    all.filter_map(|(_, c)| option(c.encode_utf8(&mut [0; 4])))
        .collect()
}

/// Whether "A", "I", "O", "E" or "Y" is a word here: a small letter follows behind a blank, except for a verb
/// of being.
fn is_word(text: &str, letter: char, end: usize) -> bool {
    let rest = &text[end..];
    let next = rest.trim_start_matches(' ');
    let verbs = [
        "is ", "was ", "and ", "or ", "because ", "since ", "as ", "by ", "fits", "seems ",
        "would ", "has ", "ist ", "est ", "es ", "porque ", "weil ", "car ",
    ];
    "AIOEYÀÉ".contains(letter)
        && rest.starts_with(' ')
        && next.starts_with(|c: char| c.is_lowercase() && !is_unspaced(c))
        && !verbs.iter().any(|v| next.starts_with(v))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_is_one() {
        let all = [
            &ALONE,
            &HEAD,
            &BOLD,
            &RIGHT,
            &TAKE,
            &CHOSEN,
            &AT_ONCE,
            &NOT_BEFORE,
            &NOT_AFTER,
            &HEDGE,
        ];
        assert!(all.iter().all(|p| p.get().is_some()));
    }

    #[test]
    fn the_option_that_is_taken_counts() {
        for (text, expected) in [
            ("Answer: B", Some('B')),
            ("(C) is right", Some('C')),
            (r"\boxed{D}", Some('D')),
            (r"$\boxed{\text{D}}$", Some('D')),
            ("B", Some('B')),
            ("b", Some('B')),
            ("B) Paris, not A", Some('B')),
            ("A is wrong because it is too small, so B.", Some('B')),
            (
                "B is correct. A is wrong because it melts, and C is too heavy.",
                Some('B'),
            ),
            ("答案是B。A是错的", Some('B')),
            ("정답은 B입니다", Some('B')),
            ("Ｂ", Some('B')),
            ("A cat sat", None),
            ("The answer is B because it fits", Some('B')),
            ("A is correct", Some('A')),
            ("(B) is what I'd say", Some('B')),
            ("I think so", None),
            ("I think the answer is A or B", None),
            ("none", None),
            ("", None),
        ] {
            assert_eq!(choice(text).letter, expected, "{text}");
        }
        let open = choice("Between B and C it is hard to say.");
        assert_eq!((open.letter, open.maybe), (None, vec!['B', 'C']));
    }
}
