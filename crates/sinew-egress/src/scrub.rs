//! Removal of secrets from responses, in case a server echoes a request. Pure.

/// Streaming filter that replaces a secret with asterisks of the same length.
#[derive(Debug)]
pub(crate) struct Scrubber {
    /// The text to remove.
    secret: Vec<u8>,
    /// Bytes that are held back, because the secret may start in them.
    held: Vec<u8>,
    /// True if the secret occurred.
    found: bool,
}

impl Scrubber {
    /// Creates a filter for one response. The secret must have at least 8 bytes.
    pub(crate) fn new(secret: &str) -> Self {
        Self {
            secret: secret.as_bytes().to_vec(),
            held: Vec::new(),
            found: false,
        }
    }

    /// Filters `bytes` and returns the output so far. Holds back fewer bytes than the secret has.
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

    /// Returns the held bytes at the end of the response.
    pub(crate) fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }

    /// True if the secret was found.
    pub(crate) fn found(&self) -> bool {
        self.found
    }
}

/// Replaces `secret` in a complete text. Returns the text, and true if the secret was found.
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
    fn secrets_are_found_across_chunks() {
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
        fn only_secrets_change_for_any_chunking(
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
