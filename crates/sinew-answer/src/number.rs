//! Numbers, read exactly.
//!
//! A number is a fraction of whole numbers of any size. A percent sign and a word such as "million" leave two
//! right readings. A sign that separates thousands in one country and decimals in another leaves a reading
//! that may be meant.

use crate::notation::{EXPRESSION, GROUP, joins, plain};
use crate::pattern;
use crate::stated::{Mark, stated};
use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{Signed, ToPrimitive, Zero};
use serde_json::Value;

/// Maximum digits of a number, and of an exponent's size.
const MAX_DIGITS: usize = 400;

/// A number as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Number {
    /// The number as it stands.
    pub value: BigRational,
    /// Readings that are as right, such as 0.5 for 50 %.
    pub also: Vec<BigRational>,
    /// Readings that may be meant, such as 1234 for 1.234.
    pub maybe: Vec<BigRational>,
    /// Whether it is the end of the text, so that more digits may have been cut off.
    pub at_end: bool,
}

impl Number {
    /// The value for metrics.
    pub fn to_f64(&self) -> f64 {
        self.value.to_f64().unwrap_or(f64::NAN)
    }
}

/// Relation of a number to the right one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// It is the right one.
    Right,
    /// No reading is right.
    Wrong,
    /// Only a reading that may be meant is right.
    Unclear,
}

/// Compares with an expected number. If there is no tolerance, whole numbers are compared exactly, and others
/// within a relative 1e-6. A tolerance is relative to the expected number, and absolute for those below 1.
pub fn compare(given: &Number, expected: &Number, tolerance: Option<f64>) -> Comparison {
    let near = |given: &BigRational, expected: &BigRational| {
        let tolerance = match tolerance {
            None if expected.is_integer() => return given == expected,
            None => 1e-6,
            Some(tolerance) => tolerance,
        };
        let one = BigRational::from_integer(1.into());
        let Some(tolerance) = BigRational::from_float(tolerance) else {
            return false;
        };
        (given - expected).abs() <= tolerance * expected.abs().max(one)
    };
    let right = |given: &BigRational| {
        near(given, &expected.value) || expected.also.iter().any(|e| near(given, e))
    };
    if right(&given.value) || given.also.iter().any(|v| near(v, &expected.value)) {
        Comparison::Right
    } else if given.maybe.iter().any(|v| near(v, &expected.value)) {
        Comparison::Unclear
    } else {
        Comparison::Wrong
    }
}

/// The number that a column holds: a number, its text, or a worked solution that states it.
pub fn expected_number(value: &Value) -> Option<Number> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        _ => return None,
    };
    let whole = plain(text.trim());
    let whole = whole.trim().trim_matches('$').trim();
    let tokens = tokens(whole);
    let around = |t: &Token| {
        let (before, after) = (&whole[..t.start], &whole[t.end..]);
        let sign = |c: char| "$€£¥₹%°. ".contains(c);
        before.chars().all(|c| sign(c) || "+-".contains(c)) && after.chars().all(sign)
    };
    match tokens.as_slice() {
        [one] if around(one) => Some(one.number.clone()),
        _ => match stated(&text)? {
            found if found.mark == Mark::Phrase && found.text.lines().count() > 1 => None,
            _ => number(&text),
        },
    }
}

/// The number of an answer: the one that it states as its result, else the last one.
pub fn number(answer: &str) -> Option<Number> {
    if let Some(found) = stated(answer) {
        let text = plain(found.text);
        let mut token = match found.mark {
            Mark::Phrase => in_phrase(&text),
            _ => in_box(&text).or_else(|| cjk(&text)),
        };
        if found.mark == Mark::Phrase && token.is_none() {
            token = cjk(text.trim_start().lines().next().unwrap_or_default());
        }
        if let Some(mut number) = token {
            number.at_end &= answer.trim_end().ends_with(found.text.trim_end());
            return Some(number);
        }
        if found.mark != Mark::Phrase {
            return None;
        }
    }
    let text = plain(answer);
    let mut lines = text.lines().rev();
    let found = lines.find_map(|line| last(line).map(|n| (line, n)));
    let Some((line, mut number)) = found else {
        return (text.chars().count() <= 24).then(|| cjk(&text)).flatten();
    };
    number.at_end &= text.trim_end().ends_with(line.trim_end());
    Some(number)
}

/// The number of a box or a tag: the first one behind the last sign of equality.
fn in_box(text: &str) -> Option<Number> {
    let behind = text
        .rsplit(['=', '≈', '→', '⇒'])
        .find(|part| !tokens(part).is_empty())?;
    let tokens = tokens(behind);
    let own = tokens.iter().find(|t| !t.part).or(tokens.first())?;
    (!behind.contains(EXPRESSION) && !own.expression).then(|| own.number.clone())
}

pattern!(
    CLAUSE,
    r"[,;，；。、]\s|[。；]|\.\s|\.$|\s\(|（|\n|\s(?:because|since|as|so|but|which|after|where)\s"
);
pattern!(
    AT_ONCE,
    r"^(?:[^\p{L}\d]|\\[(\[]|(?i:about|approximately|roughly|exactly|around|simply|just|therefore|thus|R\$|US\$|Rs\.?)\b)*[\d\x{fffc}.]"
);
/// Characters behind a phrase beyond which it begins an explanation.
const EXPLANATION: usize = 120;

/// The number that follows a phrase such as "the answer is". If an explanation follows, it is the last number
/// of that.
fn in_phrase(text: &str) -> Option<Number> {
    let text = text.trim_start_matches(|c: char| c.is_whitespace() || "*_:`".contains(c));
    if text.chars().nth(EXPLANATION).is_some() && !AT_ONCE.is_match(text) {
        return text.lines().rev().find_map(last);
    }
    let clauses = CLAUSE.get()?.find_iter(text).map(|m| m.start());
    for end in clauses.chain([text.len()]) {
        let clause = &text[..end];
        let all = tokens(clause);
        let good = |t: &&Token| !t.part && !t.label;
        let Some(first) = all.iter().find(good) else {
            continue;
        };
        let sum = clause
            .rfind('=')
            .and_then(|at| all.iter().filter(good).find(|t| t.start > at));
        let own = sum.unwrap_or(first);
        let mut number = own.number.clone();
        number.at_end = text[own.end..].trim().is_empty();
        return (!own.expression).then_some(number);
    }
    None
}

pattern!(BOLD, r"\*\*([^*\n]+)\*\*");
pattern!(ASIDE, r"\([^()]*\)|（[^（）]*）");

/// The last number of a line: the one in bold, if there is one; else outside of brackets.
fn last(line: &str) -> Option<Number> {
    let is_value = |text: &str| {
        let text = text.trim_start_matches(|c: char| c.is_whitespace() || "$€£¥₹+-".contains(c));
        text.starts_with(|c: char| c.is_ascii_digit())
    };
    let bold: Vec<Number> = BOLD
        .all(line)
        .filter(|c| is_value(&c[1]))
        .filter_map(|c| {
            tokens(&c[1])
                .into_iter()
                .find(|t| !t.part && !t.label)
                .map(|t| t.number)
        })
        .collect();
    if let [one] = bold.as_slice() {
        let at_end = line.trim_end().ends_with("**") && one.at_end;
        return Some(Number {
            at_end,
            ..one.clone()
        });
    }
    let all = tokens(line);
    let aside: Vec<_> = ASIDE.get()?.find_iter(line).collect();
    let inside = |t: &Token| aside.iter().any(|a| a.start() < t.start && t.end < a.end());
    let good = |t: &&Token| !t.part && !t.label;
    let outer = all.iter().rfind(|t| good(t) && !inside(t));
    let own = outer
        .or_else(|| all.iter().rfind(good))
        .or_else(|| all.iter().rfind(|t| !t.label));
    let own = own.or(all.last())?;
    (!own.expression).then(|| own.number.clone())
}

/// A number in a text.
struct Token {
    start: usize,
    end: usize,
    number: Number,
    /// Whether it is a part of a word, an index or a power.
    part: bool,
    /// It counts items of a list.
    label: bool,
    /// Whether it is a factor of an expression that is not a number.
    expression: bool,
}

pattern!(RUN, r"\.?\d+(?:[.,'_\x{a0}]\d+)*");
pattern!(SPACED, r"^\d{1,3}(?:\x20\d{3})+(?:[.,]\d+)?");
pattern!(SIGN, r"([-–+])\x20?(?:US\$|R\$|S/|Rs\.?|[$€£¥₹₩])?\x20?$");
pattern!(LABEL, r"^[.)、]\s+\S");

/// All numbers of a plain text, in order.
fn tokens(text: &str) -> Vec<Token> {
    let mut found: Vec<Token> = Vec::new();
    let mut at = 0;
    while let Some(run) = RUN.get().and_then(|p| p.find_at(text, at)) {
        let (start, mut end) = (run.start(), run.end());
        let before = &text[..start];
        at = end;
        let readings = readings(run.as_str());
        let Some((mut value, mut maybe)) = readings else {
            // A list without blanks: its numbers one by one. Versions and addresses are none.
            if let Some(first) = run
                .as_str()
                .find(',')
                .filter(|_| !run.as_str().contains('.'))
            {
                at = start + first + 1;
                let value = decimal(&run.as_str()[..first]);
                found.extend(value.map(|v| token(text, (start, start + first), v, Vec::new())));
            }
            continue;
        };
        if let Some(spaced) = SPACED.get().and_then(|p| p.find(&text[start..])) {
            let next = &text[start + spaced.end()..];
            let more = next.starts_with(|c: char| c.is_ascii_digit())
                || next
                    .strip_prefix(' ')
                    .is_some_and(|n| n.starts_with(|c: char| c.is_ascii_digit()));
            let joined = decimal(&spaced.as_str().replace(' ', "").replace(',', "."));
            if let (false, Some(joined), true) = (more, joined, spaced.end() > run.len()) {
                let parts = spaced.as_str().rsplit(' ').next().and_then(decimal);
                (value, maybe) = (joined, parts.into_iter().collect());
                end = start + spaced.end();
            }
        }
        let mut one = token(text, (start, end), value, maybe);
        one.label = before
            .rsplit('\n')
            .next()
            .is_some_and(|l| l.trim().is_empty())
            && LABEL.is_match(&text[end..]);
        at = one.end;
        found.push(one);
    }
    found
}

/// A number at a place, with what follows and goes before.
fn token(
    text: &str,
    (start, end): (usize, usize),
    value: BigRational,
    maybe: Vec<BigRational>,
) -> Token {
    let before = &text[..start];
    let (value, mut end) = powers(text, end, value);
    let (value, also, more) = units(&text[end..], value);
    end += more;
    let sign = sign(before);
    let number = Number {
        value: value * &sign,
        also: also.into_iter().map(|v| v * &sign).collect(),
        maybe: maybe.into_iter().map(|v| v * &sign).collect(),
        at_end: text[end..].trim().is_empty(),
    };
    let near = |c: char| c == EXPRESSION || c == '√' || c == 'π';
    let next = text[end..].trim_start_matches([' ', '×', '*', '·', '}']);
    let prior = before.trim_end_matches([' ', '×', '*', '·', '{']);
    let last = before.chars().next_back();
    let part = last.is_some_and(joins)
        || before.ends_with(['^', '_', '.'])
        || before.ends_with("^{")
        || before.ends_with("_{")
        || (before.ends_with([',', '.', '/', ':'])
            && before[..before.len() - 1].ends_with(|c: char| c.is_ascii_digit()));
    Token {
        start,
        end,
        number,
        part,
        label: false,
        expression: next.starts_with(near) || prior.ends_with(near),
    }
}

/// 1, or -1 behind a sign that belongs to the number.
fn sign(before: &str) -> BigRational {
    let one = BigRational::from_integer(1.into());
    let Some(found) = SIGN.captures(before) else {
        return one;
    };
    let sign = &found[1];
    let prior = &before[..before.len() - found[0].len()];
    let apart = found[0].starts_with("- ") || found[0].starts_with("– ");
    let last = prior.chars().next_back();
    let free = match last {
        // A list's item begins with a dash and a blank.
        None => !apart,
        Some('=' | '(' | '≈' | '{' | '[' | ',') => true,
        Some(c) if apart => c == ' ' && prior.trim_end().ends_with(['=', '≈']),
        Some(c) => !c.is_alphanumeric() && !")]}%".contains(c) || crate::notation::is_unspaced(c),
    };
    match sign {
        "+" => one,
        _ if free => -one,
        _ => one,
    }
}

pattern!(PLAIN, r"^(?:\d+|\d*\.\d+)$");
pattern!(
    THOUSANDS,
    r"^[1-9]\d{0,2}(?:(?:,\d{3})+|(?:'\d{3})+|(?:_\d{3})+|(?:\x{a0}\d{3})+)(?:\.\d+)?$"
);
pattern!(INDIAN, r"^[1-9]\d?(?:,\d{2})+,\d{3}(?:\.\d+)?$");
pattern!(
    DOTTED,
    r"^[1-9]\d{0,2}(?:(?:\.\d{3}){2,}|(?:(?:\.\d{3})+|(?:'\d{3})+|(?:\x{a0}\d{3})+),\d+)$"
);
pattern!(COMMA, r"^\d+,\d+$");
pattern!(DOT_OR_GROUP, r"^[1-9]\d{0,2}[.,]\d{3}$");
pattern!(UNDERSCORED, r"^\d+(?:_\d+)+$");

/// A run of digits as a number, and as what else it may mean.
fn readings(run: &str) -> Option<(BigRational, Vec<BigRational>)> {
    let bare = |run: &str| decimal(&run.replace([',', '\'', '_', GROUP], ""));
    let dotted = |run: &str| decimal(&run.replace(['.', '\'', GROUP], "").replace(',', "."));
    if PLAIN.is_match(run) {
        let group = DOT_OR_GROUP.is_match(run).then(|| dotted(run)).flatten();
        return Some((decimal(run)?, group.into_iter().collect()));
    }
    if THOUSANDS.is_match(run) || INDIAN.is_match(run) || UNDERSCORED.is_match(run) {
        let comma = DOT_OR_GROUP.is_match(run).then(|| dotted(run)).flatten();
        return Some((bare(run)?, comma.into_iter().collect()));
    }
    if DOTTED.is_match(run) {
        return Some((dotted(run)?, Vec::new()));
    }
    if COMMA.is_match(run) {
        let last = run.rsplit(',').next().and_then(decimal);
        return Some((dotted(run)?, last.into_iter().collect()));
    }
    None
}

/// Digits with at most one point, exactly.
fn decimal(text: &str) -> Option<BigRational> {
    if text.len() > MAX_DIGITS {
        return None;
    }
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let digits: BigInt = format!("{whole}{part}").parse().ok()?;
    Some(BigRational::new(
        digits,
        BigInt::from(10).pow(part.len() as u32),
    ))
}

/// A power of a number with a small exponent.
fn power(value: &BigRational, exponent: &str) -> Option<BigRational> {
    let exponent: i32 = exponent
        .parse()
        .ok()
        .filter(|e: &i32| e.unsigned_abs() as usize <= MAX_DIGITS)?;
    let size = value.numer().bits() + value.denom().bits();
    let fits = size.saturating_mul(u64::from(exponent.unsigned_abs())) <= 8 * MAX_DIGITS as u64;
    (fits && (exponent >= 0 || !value.is_zero())).then(|| num_traits::Pow::pow(value, exponent))
}

pattern!(EXPONENT, r"^[eE]([-+]?\d{1,4})");
pattern!(
    TEN,
    r"^\s*[×x*·]\s*10\s*(?:\^|\*\*)\s*(?:\{\s*)?([-+]?\d{1,4})(?:\s*\})?"
);
pattern!(POWER, r"^\s?\^\s*(?:\{\s*)?([-+]?\d{1,4})(?:\s*\})?");
pattern!(FRACTION, r"^\s?/\s?(\d{1,40})");
pattern!(
    MIXED,
    r"^(?:\x20and\x20|[\x20\x{a0}]{1,2})(\d{1,40})\s?/\s?(\d{1,40})"
);

/// Exponent, power, fraction and mixed number behind a number: the value, and where it ends.
fn powers(text: &str, end: usize, value: BigRational) -> (BigRational, usize) {
    let rest = &text[end..];
    let ten = BigRational::from_integer(10.into());
    let alone = |len: usize| !rest[len..].starts_with(|c: char| c.is_ascii_alphanumeric());
    for pattern in [&EXPONENT, &TEN] {
        if let Some(found) = pattern.captures(rest).filter(|f| alone(f[0].len()))
            && let Some(factor) = power(&ten, &found[1])
        {
            return (value * factor, end + found[0].len());
        }
    }
    if let Some(found) = POWER.captures(rest)
        && let Some(raised) = power(&value, &found[1])
    {
        return (raised, end + found[0].len());
    }
    let closed = |len: usize| {
        let next = rest[len..].trim_start_matches(' ');
        !next.starts_with(['/', '^']) && alone(len) && !rest[len..].starts_with('.')
            || rest[len..].starts_with(". ")
            || &rest[len..] == "."
    };
    let whole = |digits: &str| decimal(digits).filter(|d| !d.is_zero());
    if let Some(found) = FRACTION.captures(rest).filter(|f| closed(f[0].len()))
        && let Some(below) = whole(&found[1])
    {
        return (value / below, end + found[0].len());
    }
    if let Some(found) = MIXED.captures(rest).filter(|f| closed(f[0].len()))
        && value.is_integer()
        && let (Some(above), Some(below)) = (decimal(&found[1]), whole(&found[2]))
        && above < below
    {
        return (value + above / below, end + found[0].len());
    }
    (value, end)
}

/// Factors that follow a number as a word.
const FACTORS: [(&str, u32); 27] = [
    ("thousand", 3),
    ("million", 6),
    ("billion", 9),
    ("trillion", 12),
    ("millions", 6),
    ("billions", 9),
    ("mil", 3),
    ("millones", 6),
    ("millón", 6),
    ("milhões", 6),
    ("milhão", 6),
    ("Millionen", 6),
    ("Mio", 6),
    ("Milliarden", 9),
    ("Mrd", 9),
    ("milliards", 9),
    ("тысяч", 3),
    ("миллионов", 6),
    ("миллиона", 6),
    ("lakh", 5),
    ("crore", 7),
    ("bn", 9),
    ("mn", 6),
    ("k", 3),
    ("K", 3),
    ("M", 6),
    ("B", 9),
];
/// Factors that are a part of the number, written behind its digits.
const TENS: [(&str, u32); 13] = [
    ("百万", 6),
    ("千万", 7),
    ("百亿", 10),
    ("万", 4),
    ("萬", 4),
    ("만", 4),
    ("億", 8),
    ("亿", 8),
    ("억", 8),
    ("兆", 12),
    ("조", 12),
    ("千", 3),
    ("천", 3),
];
/// Units that begin with a factor's character, such as 千克, the kilogram.
const UNITS: [char; 9] = ['克', '米', '瓦', '卡', '赫', '帕', '字', '伏', '焦'];

/// The value with the factor or percent sign behind it, readings that are as right, and the length of both.
fn units(rest: &str, value: BigRational) -> (BigRational, Vec<BigRational>, usize) {
    let ten = |n: u32| BigRational::from_integer(BigInt::from(10).pow(n));
    let word = rest.trim_start_matches([' ', GROUP]);
    let blank = rest.len() - word.len();
    for (sign, zeros) in [
        ("%", 2),
        ("percent", 2),
        ("per cent", 2),
        ("pour cent", 2),
        ("Prozent", 2),
        ("‰", 3),
    ] {
        if word.starts_with(sign) && blank <= 2 {
            let share = &value / ten(zeros);
            return (value, vec![share], blank + sign.len());
        }
    }
    let named = FACTORS.iter().find(|(name, _)| {
        let after = word.strip_prefix(name);
        after.is_some_and(|a| !a.starts_with(char::is_alphanumeric))
            && (name.len() > 2 || blank == 0)
    });
    if let Some((name, zeros)) = named {
        let product = &value * ten(*zeros);
        return (value, vec![product], blank + name.len());
    }
    let (mut sum, mut last, mut at) = (BigRational::zero(), value.clone(), 0);
    loop {
        let here = rest[at..].trim_start_matches(' ');
        let skipped = rest.len() - at - here.len();
        let found = TENS.iter().find(|(name, _)| {
            here.strip_prefix(name)
                .is_some_and(|a| !a.starts_with(UNITS))
        });
        let Some((name, zeros)) = found else {
            break;
        };
        at += skipped + name.len();
        sum += last * ten(*zeros);
        let digits = rest[at..]
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len() - at);
        last = match decimal(&rest[at..at + digits]) {
            Some(next) if digits > 0 => next,
            _ => BigRational::zero(),
        };
        at += digits;
    }
    match at {
        0 => (value, Vec::new(), 0),
        at => (sum + last, vec![value], at),
    }
}

/// The first number in ideographs, such as 四十二.
fn cjk(text: &str) -> Option<Number> {
    let is_digit = |c: char| "〇零一二两兩三四五六七八九".contains(c);
    let is_unit = |c: char| "十百千万萬億亿".contains(c);
    let start = text.find(|c: char| is_digit(c) || c == '十')?;
    let run: String = text[start..]
        .chars()
        .take_while(|c| is_digit(*c) || is_unit(*c))
        .take(40)
        .collect();
    let (mut sum, mut section, mut digit) = (0u64, 0u64, None);
    let positional = run.chars().count() > 1 && run.chars().all(is_digit);
    for c in run.chars() {
        let value = match c {
            '〇' | '零' => 0,
            '两' | '兩' => 2,
            c => "一二三四五六七八九"
                .chars()
                .position(|d| d == c)
                .map_or(0, |i| i as u64 + 1),
        };
        match c {
            c if is_digit(c) && positional => sum = sum.checked_mul(10)?.checked_add(value)?,
            c if is_digit(c) => digit = Some(value),
            '十' | '百' | '千' => {
                let unit = match c {
                    '十' => 10,
                    '百' => 100,
                    _ => 1000,
                };
                section += digit.take().unwrap_or(1) * unit;
            }
            c => {
                let unit = if "万萬".contains(c) {
                    10_000
                } else {
                    100_000_000
                };
                section += digit.take().unwrap_or(0);
                sum = sum.checked_add(section.checked_mul(unit)?)?;
                section = 0;
            }
        }
    }
    let value = BigInt::from(sum + section + digit.unwrap_or(0));
    Some(Number {
        value: BigRational::from_integer(value),
        also: Vec::new(),
        maybe: Vec::new(),
        at_end: text[start + run.len()..].trim().is_empty(),
    })
}

#[cfg(test)]
#[path = "number_tests.rs"]
mod tests;
