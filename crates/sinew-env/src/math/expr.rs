//! Exact evaluation of integer expressions.

/// Evaluates an expression with `+ - * /`, parentheses and decimal integers. Returns `None` if it is
/// malformed, overflows, or has a division with a remainder.
pub(super) fn evaluate(text: &str) -> Option<i64> {
    let mut parser = Parser {
        rest: text.as_bytes(),
    };
    let value = parser.sum()?;
    parser.skip_spaces();
    parser.rest.is_empty().then_some(value)
}

/// Recursive descent parser that evaluates directly.
struct Parser<'a> {
    /// Bytes that are not read yet.
    rest: &'a [u8],
}

impl Parser<'_> {
    /// Skips spaces, no other white space.
    fn skip_spaces(&mut self) {
        while let [b' ', rest @ ..] = self.rest {
            self.rest = rest;
        }
    }

    /// Consumes one of the bytes `wanted`, after spaces.
    fn take(&mut self, wanted: &[u8]) -> Option<u8> {
        self.skip_spaces();
        match self.rest {
            [first, rest @ ..] if wanted.contains(first) => {
                self.rest = rest;
                Some(*first)
            }
            _ => None,
        }
    }

    /// Terms joined by `+` and `-`.
    fn sum(&mut self) -> Option<i64> {
        let mut value = self.product()?;
        while let Some(sign) = self.take(b"+-") {
            let term = self.product()?;
            value = match sign {
                b'+' => value.checked_add(term)?,
                _ => value.checked_sub(term)?,
            };
        }
        Some(value)
    }

    /// Factors joined by `*` and `/`.
    fn product(&mut self) -> Option<i64> {
        let mut value = self.atom()?;
        while let Some(sign) = self.take(b"*/") {
            let factor = self.atom()?;
            value = match sign {
                b'*' => value.checked_mul(factor)?,
                _ if factor != 0 && value % factor == 0 => value / factor,
                _ => return None,
            };
        }
        Some(value)
    }

    /// A number or an expression in parentheses.
    fn atom(&mut self) -> Option<i64> {
        if self.take(b"(").is_some() {
            let value = self.sum()?;
            return self.take(b")").map(|_| value);
        }
        let mut value: Option<i64> = None;
        while let Some(digit) = self.rest.first().filter(|b| b.is_ascii_digit()) {
            let digit = i64::from(digit - b'0');
            value = Some(value.unwrap_or(0).checked_mul(10)?.checked_add(digit)?);
            self.rest = &self.rest[1..];
        }
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn precedence_and_parentheses_are_respected() {
        assert_eq!(evaluate("2 + 3 * 4 - 1"), Some(13));
        assert_eq!(evaluate("(2 + 3) * 4"), Some(20));
        assert_eq!(evaluate("100 / 5 / 4"), Some(5));
    }

    #[test]
    fn invalid_and_inexact_expressions_have_no_value() {
        for text in [
            "",
            "1 +",
            "(1",
            "1)",
            "7 / 2",
            "1 / 0",
            "a",
            "9999999999999999999",
            "1 2",
        ] {
            assert_eq!(evaluate(text), None, "{text}");
        }
    }
}
