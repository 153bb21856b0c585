//! Parsing of numbers and final answers in model output.

/// Parses a number with optional sign, currency sign, thousands separators and decimals. Returns `None` for
/// anything else, including infinity and NaN.
pub fn parse_number(text: &str) -> Option<f64> {
    let text = text.trim().trim_start_matches(['$', '€', '£']);
    let (sign, digits) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest.trim_start_matches(['$', '€', '£'])),
        None => (1.0, text),
    };
    let plain: String = digits.chars().filter(|&c| c != ',').collect();
    let wellformed = plain.starts_with(|c: char| c.is_ascii_digit())
        && plain.chars().all(|c| c.is_ascii_digit() || c == '.')
        && plain.matches('.').count() <= 1
        && plain.len() <= 40;
    if !wellformed {
        return None;
    }
    plain.parse::<f64>().ok().map(|v| sign * v)
}

/// True if `a` equals `b`: exactly if both are whole numbers, else within an error of 1e-6, because tools may
/// print floats. The error is relative to numbers above 1 that are not whole.
pub fn same_number(a: f64, b: f64) -> bool {
    let whole = |v: f64| v.fract() == 0.0;
    match (whole(a), whole(b)) {
        (true, true) => a == b,
        (false, true) => (a - b).abs() <= 1e-6,
        _ => (a - b).abs() <= 1e-6 * b.abs().max(1.0),
    }
}

/// Returns the number after the last `Answer:`, in any notation. If a limit cut the message right after the
/// digits, there is no answer, because digits could be missing.
pub fn final_answer(text: &str, truncated: bool) -> Option<f64> {
    const MARK: &str = "answer:";
    let lower = text.to_ascii_lowercase();
    let at = lower.replace('：', ":  ").rfind(MARK)?;
    let number = sinew_answer::number(&text[at..])?;
    (!truncated || !number.at_end).then(|| number.to_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_notations_are_parsed() {
        assert_eq!(parse_number(" $1,234.50 "), Some(1234.5));
        assert_eq!(parse_number("-$12"), Some(-12.0));
        assert_eq!(parse_number("007"), Some(7.0));
        for text in ["", "-", "1.2.3", "inf", "nan", "1e9", "12 apples", "٣"] {
            assert_eq!(parse_number(text), None, "{text}");
        }
        assert_eq!(parse_number(&"9".repeat(50)), None);
    }

    #[test]
    fn last_answer_counts() {
        let cases = [
            ("Answer: 42", Some(42.0)),
            ("so **Answer:** 1,024.", Some(1024.0)),
            ("answer: 1 no, Answer: -7 apples", Some(-7.0)),
            ("Answer: $3.50 each", Some(3.5)),
            ("Answer: −7", Some(-7.0)),
            ("Answer：４２", Some(42.0)),
            ("**Answer:** 1{,}234", Some(1234.0)),
            ("Answer: 3 + 4 = 7", Some(7.0)),
            ("Answer: forty", None),
            ("The result is 42", None),
            ("Answer:", None),
        ];
        for (text, expected) in cases {
            assert_eq!(final_answer(text, false), expected, "{text}");
        }
        assert_eq!(final_answer("Answer: 12", true), None);
        assert_eq!(final_answer("Answer: 12 apples and th", true), Some(12.0));
    }

    #[test]
    fn floats_equal_their_integers() {
        assert!(same_number(392.00000001, 392.0));
        assert!(!same_number(391.0, 392.0));
        assert!(same_number(0.0, 0.0));
        assert!(!same_number(1_234_568.0, 1_234_567.0));
        assert!(!same_number(1_234_567.5, 1_234_567.0));
        assert!(same_number(0.333_333_3, 1.0 / 3.0));
        assert!(!same_number(f64::NAN, 1.0));
    }
}
