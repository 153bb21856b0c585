//! Text that comes in pieces, cut between characters.

/// Holds back the bytes of an incomplete character of UTF-8. Bytes that are not UTF-8 pass unchanged.
#[derive(Clone, Debug, Default)]
pub struct Characters {
    /// Bytes held back, at most three.
    held: Vec<u8>,
}

impl Characters {
    /// Takes the next piece. Returns all bytes so far that were not returned yet, except those of a character
    /// whose end is missing.
    pub fn add(&mut self, piece: &[u8]) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.held);
        bytes.extend_from_slice(piece);
        let last = bytes.len().saturating_sub(3);
        // The first byte of the last character, if it is one of several.
        let start = bytes[last..].iter().rposition(|b| *b & 0xC0 != 0x80);
        if let Some(start) = start.map(|at| last + at)
            && let Err(error) = std::str::from_utf8(&bytes[start..])
            && error.error_len().is_none()
        {
            self.held = bytes.split_off(start);
        }
        bytes
    }

    /// Returns the bytes held back, once nothing more comes.
    pub fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_text_end_between_characters_wherever_it_is_cut() {
        let text = "a\u{e9}\u{20ac}\u{1f600}b\u{1f600}\u{20ac}\u{e9}";
        for size in 1..text.len() {
            let mut characters = Characters::default();
            let mut all = String::new();
            for piece in text.as_bytes().chunks(size) {
                let whole = String::from_utf8(characters.add(piece));
                all += &whole.expect("whole characters");
            }
            assert_eq!(all, text);
            assert!(characters.rest().is_empty());
        }
    }

    #[test]
    fn bytes_that_are_no_text_all_pass() {
        let bytes: Vec<u8> = (0..=255)
            .chain([0xF0, 0x9F, 0x41, 0xC3, 0xE2, 0x82])
            .collect();
        for size in 1..bytes.len() {
            let mut characters = Characters::default();
            let mut all = Vec::new();
            for piece in bytes.chunks(size) {
                all.extend(characters.add(piece));
                assert!(characters.held.len() < 4);
            }
            all.extend(characters.rest());
            assert_eq!(all, bytes);
        }
    }
}
