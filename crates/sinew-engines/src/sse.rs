//! Server-sent events, put together from the pieces that arrive. Pure. The crate eventsource-stream is not
//! used, as it bounds no event.
//! <https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream>

/// Maximum length of an event; a cumulative answer of a long context fits, and the experts of its tokens
/// ([`sinew_types::MAX_ROUTE_BYTES`] in base64).
const MAX_EVENT_BYTES: usize = 96 << 20;

/// An event that is longer than any server has reason to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event is longer than {limit} bytes")]
pub struct TooLong {
    /// Bytes that are allowed.
    pub limit: usize,
}

/// Yields the `data` of complete events; other fields and comments are dropped.
#[derive(Debug, Default)]
pub struct SseParser {
    /// Bytes of a line whose end has not come.
    line: Vec<u8>,
    /// Data lines of an event whose end has not come.
    data: Vec<u8>,
    has_data: bool,
    /// The last byte was a carriage return: a line feed that follows belongs to it.
    after_return: bool,
}

impl SseParser {
    /// Takes the next bytes; appends the data of each event that they complete to `events`.
    ///
    /// # Errors
    /// If an event is too long; the stream is useless then.
    pub fn push(&mut self, bytes: &[u8], events: &mut Vec<Vec<u8>>) -> Result<(), TooLong> {
        for &byte in bytes {
            let after_return = std::mem::replace(&mut self.after_return, byte == b'\r');
            match byte {
                b'\n' if after_return => {}
                b'\n' | b'\r' => self.line_ended(events),
                _ => self.line.push(byte),
            }
            if self.line.len() + self.data.len() > MAX_EVENT_BYTES {
                return Err(TooLong {
                    limit: MAX_EVENT_BYTES,
                });
            }
        }
        Ok(())
    }

    /// Whether the stream ended in the middle of an event.
    pub fn is_cut(&self) -> bool {
        self.has_data || !self.line.is_empty()
    }

    fn line_ended(&mut self, events: &mut Vec<Vec<u8>>) {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            if std::mem::take(&mut self.has_data) {
                events.push(std::mem::take(&mut self.data));
            }
            return;
        }
        let (field, value) = match line.iter().position(|&b| b == b':') {
            Some(at) => (&line[..at], &line[at + 1..]),
            None => (&line[..], &[][..]),
        };
        if field == b"data" {
            if self.has_data {
                self.data.push(b'\n');
            }
            let value = value.strip_prefix(b" ").unwrap_or(value);
            self.data.extend_from_slice(value);
            self.has_data = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(pieces: &[&[u8]]) -> (Vec<String>, bool) {
        let (mut parser, mut events) = (SseParser::default(), Vec::new());
        for piece in pieces {
            parser.push(piece, &mut events).unwrap();
        }
        let events = events.into_iter().map(|e| String::from_utf8(e).unwrap());
        (events.collect(), parser.is_cut())
    }

    #[test]
    fn events_comments_and_line_ends() {
        let text =
            b":\n\ndata: a\n\nevent: x\r\ndata:b\r\ndata: c\r\n\r\nid: 3\n\ndata: [DONE]\r\r";
        let (events, cut) = parse(&[text]);
        assert_eq!(events, ["a", "b\nc", "[DONE]"]);
        assert!(!cut);
    }

    #[test]
    fn an_unfinished_event_is_not_told() {
        assert_eq!(
            parse(&[b"data: a\n\ndata: {\"x\""]),
            (vec!["a".to_owned()], true)
        );
        assert_eq!(parse(&[b"data: a\n"]), (vec![], true));
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut parser = SseParser::default();
        let long = vec![b'x'; MAX_EVENT_BYTES + 1];
        assert!(parser.push(&long, &mut Vec::new()).is_err());
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
            text in "(data: [a-c]{0,3}|:|event: x|\n|\r|\r\n){0,12}",
            cuts in prop::collection::vec(0..200usize, 0..6),
        ) {
            let bytes = text.as_bytes();
            let mut cuts: Vec<usize> = cuts.iter().map(|c| c % (bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|w| &bytes[w[0]..w[1]]).collect();
            prop_assert_eq!(parse(&pieces), parse(&[bytes]));
        }
    }
}
