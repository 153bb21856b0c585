//! Keeps a secret from coming back: a server that echoes what it was sent must not tell it. Pure.

/// Replaces a secret in a stream by as many asterisks, so that lengths stay true.
#[derive(Debug)]
pub(crate) struct Scrubber {
    secret: Vec<u8>,
    held: Vec<u8>,
    found: bool,
}

impl Scrubber {
    /// For one response. The secret has at least 8 bytes.
    pub(crate) fn new(secret: &str) -> Self {
        Self {
            secret: secret.as_bytes().to_vec(),
            held: Vec::new(),
            found: false,
        }
    }

    /// Bytes that may go out; the last few are held back, as the secret may begin in them.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.held.extend_from_slice(bytes);
        let n = self.secret.len();
        let mut at = 0;
        while at + n <= self.held.len() {
            if self.held[at..at + n] == self.secret[..] {
                self.held[at..at + n].fill(b'*');
                self.found = true;
                at += n;
            } else {
                at += 1;
            }
        }
        let rest = self.held.split_off(at.min(self.held.len()));
        std::mem::replace(&mut self.held, rest)
    }

    /// What was held back.
    pub(crate) fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }

    /// Whether the secret came by.
    pub(crate) fn found(&self) -> bool {
        self.found
    }
}

/// A text without the secret.
pub(crate) fn scrub(text: &[u8], secret: &str) -> (Vec<u8>, bool) {
    let mut scrubber = Scrubber::new(secret);
    let mut out = scrubber.push(text);
    out.extend(scrubber.finish());
    (out, scrubber.found())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_secret_across_chunks_is_found_one_byte_at_a_time() {
        let mut scrubber = Scrubber::new("hunter2-hunter2");
        let mut out = Vec::new();
        for byte in b"before hunter2-hunter2 after" {
            out.extend(scrubber.push(&[*byte]));
        }
        out.extend(scrubber.finish());
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "before *************** after"
        );
        assert!(scrubber.found());
    }

    proptest! {
        #[test]
        fn nothing_else_changes_however_it_is_cut(
            pieces in proptest::collection::vec("[ab]{0,6}|(aabab){1}", 0..12),
        ) {
            let secret = "aabab";
            let whole: String = pieces.concat();
            let mut scrubber = Scrubber::new(secret);
            let mut out = Vec::new();
            for piece in &pieces {
                out.extend(scrubber.push(piece.as_bytes()));
            }
            out.extend(scrubber.finish());
            let out = String::from_utf8(out).unwrap();
            prop_assert_eq!(&out, &whole.replace(secret, "*****"));
            prop_assert_eq!(scrubber.found(), whole.contains(secret));
        }
    }
}
