//! Filters the output of hostile code for a terminal.
//!
//! Text passes, and so do known sequences that move the cursor, paint and clear; nothing else does. Sequences
//! that make a terminal do more than show are left out: titles, clipboards, links, files, printers, device
//! control. So are those that make it answer: reports of position, size, device, modes, window. An answer is
//! typed at whatever reads next: after the session, that is a shell of the host.

/// Maximum bytes of a control sequence; a longer one is left out.
const MAX_SEQUENCE: usize = 64;

/// Position in a stream of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum State {
    /// Text.
    #[default]
    Text,
    /// The byte follows ESC.
    Escape,
    /// The byte is in a control sequence, after ESC [.
    Sequence,
    /// The byte is in a control string, whose content is left out.
    String,
    /// The byte follows an ESC in a control string.
    StringEscape,
    /// The byte precedes the last one of an escape sequence that is left out.
    Swallow,
    /// The byte follows 0xC2, with which the control characters U+0080 to U+009F begin.
    Control,
}

/// Lets through what a terminal may receive. It holds at most [`MAX_SEQUENCE`] bytes back.
#[derive(Debug, Default)]
pub(super) struct Filter {
    state: State,
    /// The sequence that has begun, with its ESC.
    held: Vec<u8>,
    /// Bytes that the character in progress still needs.
    inside: u8,
}

impl Filter {
    /// The part of `bytes`, and of earlier bytes held back, that a terminal may get.
    pub(super) fn pass(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len());
        for &byte in bytes {
            self.state = self.next(byte, &mut out);
        }
        out
    }

    fn next(&mut self, byte: u8, out: &mut Vec<u8>) -> State {
        match (self.state, byte) {
            (State::Control, 0x80..=0x9f) => {
                // The same as ESC and a letter, of which none is needed.
                match byte {
                    0x90 | 0x98 | 0x9d | 0x9e | 0x9f => State::String,
                    0x9b => self.begin(b"\x1b["),
                    _ => State::Text,
                }
            }
            (State::Control, _) => {
                out.push(0xc2);
                (self.state, self.inside) = (State::Text, 1);
                self.next(byte, out)
            }
            // CAN and SUB end what has begun.
            (State::Text, 0x18 | 0x1a) => State::Text,
            (_, 0x18 | 0x1a) => State::Text,
            (State::String, 0x07) => State::Text,
            (State::String, 0x1b) => State::StringEscape,
            (State::String, _) => State::String,
            (State::StringEscape, b'\\') => State::Text,
            (State::StringEscape, 0x1b) => State::StringEscape,
            // Some terminals end a string at any ESC.
            (State::StringEscape, _) => {
                self.begin(b"\x1b");
                self.escape(byte, out)
            }
            (State::Text, 0x1b) => self.begin(b"\x1b"),
            (State::Swallow, 0x20..=0x2f) => State::Swallow,
            (State::Swallow, _) => State::Text,
            (State::Text, 0xc2) => State::Control,
            // A byte inside of a character; some terminals take a single one for a control character.
            (State::Text, 0x80..=0xbf) => {
                if self.inside > 0 {
                    self.inside -= 1;
                    out.push(byte);
                }
                State::Text
            }
            // ENQ is answered with a text that can be set.
            (State::Text, 0x05) => State::Text,
            (State::Text, _) => {
                self.inside = match byte {
                    0xc3..=0xdf => 1,
                    0xe0..=0xef => 2,
                    0xf0..=0xf4 => 3,
                    _ => 0,
                };
                out.push(byte);
                State::Text
            }
            (State::Escape, _) => self.escape(byte, out),
            (State::Sequence, _) => self.sequence(byte, out),
        }
    }

    /// Begins a sequence.
    fn begin(&mut self, with: &[u8]) -> State {
        self.held = with.to_vec();
        match with.len() {
            1 => State::Escape,
            _ => State::Sequence,
        }
    }

    /// A byte after ESC.
    fn escape(&mut self, byte: u8, out: &mut Vec<u8>) -> State {
        self.held.push(byte);
        match byte {
            b'[' => State::Sequence,
            // DCS, SOS, OSC, PM, APC; the title of screen.
            b'P' | b'X' | b']' | b'^' | b'_' | b'k' => State::String,
            // DECID asks for the device.
            b'Z' => State::Text,
            0x1b => self.begin(b"\x1b"),
            // The size of controls that the terminal sends, and another encoding than UTF-8.
            b' ' | b'%' => State::Swallow,
            // Intermediate bytes: a character set and its like.
            0x21..=0x2f if self.held.len() < MAX_SEQUENCE => State::Escape,
            0x30..=0x7e => {
                out.append(&mut self.held);
                State::Text
            }
            _ => State::Text,
        }
    }

    /// A byte of a control sequence.
    fn sequence(&mut self, byte: u8, out: &mut Vec<u8>) -> State {
        match byte {
            0x1b => self.begin(b"\x1b"),
            0x20..=0x3f => {
                if self.held.len() < MAX_SEQUENCE {
                    self.held.push(byte);
                }
                State::Sequence
            }
            0x40..=0x7e => {
                self.held.push(byte);
                if self.held.len() <= MAX_SEQUENCE && paints(&self.held[2..]) {
                    out.append(&mut self.held);
                }
                State::Text
            }
            // Control characters in a sequence are carried out, and it continues.
            0x07..=0x0d => {
                out.push(byte);
                State::Sequence
            }
            _ => State::Text,
        }
    }
}

/// Private modes (DECSET) that a program may set: those that paint, and those whose reports end with the
/// session, since the reset after it turns them off.
const PRIVATE_MODES: [&[u8]; 20] = [
    b"1", b"3", b"5", b"6", b"7", b"12", b"25", b"45", b"47", b"66", b"69", b"1000", b"1002",
    b"1003", b"1004", b"1005", b"1006", b"1049", b"2004", b"2026",
];

/// Whether a control sequence, without its ESC [, only paints, clears or moves the cursor. All others are
/// left out: those that a terminal answers, that move its window, print, or set what outlasts the session.
fn paints(sequence: &[u8]) -> bool {
    let Some((last, before)) = sequence.split_last() else {
        return false;
    };
    let digits = |b: &u8| b.is_ascii_digit() || b";:".contains(b);
    let plain = before.iter().all(digits);
    match last {
        // The mark `?` makes clearing spare protected characters.
        b'J' | b'K' => before
            .strip_prefix(b"?")
            .unwrap_or(before)
            .iter()
            .all(digits),
        b'A'..=b'I' | b'L' | b'M' | b'P' | b'S' | b'X' | b'Z' | b'@' | b'`' => plain,
        b'a' | b'b' | b'd'..=b'g' | b'm' | b'r' | b's' | b'u' => plain,
        // The sequence asks for the mouse if it has more parameters.
        b'T' => plain && !before.contains(&b';'),
        b'h' | b'l' => match before.strip_prefix(b"?") {
            Some(modes) => modes
                .split(|b| *b == b';')
                .all(|m| PRIVATE_MODES.contains(&m)),
            // Insert and replace.
            None => before == b"4",
        },
        // The shape of the cursor, and a soft reset.
        b'q' => before
            .strip_suffix(b" ")
            .is_some_and(|b| b.iter().all(digits)),
        b'p' => before == b"!",
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_painting_go_through() {
        for text in [
            "plain \u{e9} \u{4f60}\u{1f600}\r\n\t\u{8}\u{7}",
            "\u{1b}[1;31mred\u{1b}[0m\u{1b}[2J\u{1b}[10;20H\u{1b}[?1049h\u{1b}[?25l\u{1b}[K\u{1b}[3S",
            "\u{1b}(B\u{1b}7\u{1b}8\u{1b}M\u{1b}=\u{1b}c\u{1b}[2 q\u{1b}[!p\u{1b}[u",
            "\u{a9}\u{b0}",
        ] {
            assert_eq!(
                Filter::default().pass(text.as_bytes()),
                text.as_bytes(),
                "{text:?}"
            );
        }
    }

    #[test]
    fn what_answers_or_does_more_than_show_is_left_out() {
        for hostile in [
            "\u{1b}]0;title\u{7}",
            "\u{1b}]52;c;cm0gLXJm\u{1b}\\",
            "\u{1b}Pq#0\u{1b}\\",
            "\u{1b}_Gf=1\u{1b}\\",
            "\u{1b}^x\u{1b}\\",
            "\u{1b}Xx\u{1b}\\",
            "\u{1b}ktitle\u{1b}\\",
            "\u{9d}0;title\u{9c}",
            "\u{90}$q\u{9c}",
            "\u{1b}[6n",
            "\u{9b}6n",
            "\u{1b}[c",
            "\u{1b}[>c",
            "\u{1b}[21t",
            "\u{1b}[?1$p",
            "\u{1b}[>q",
            "\u{1b}[?u",
            "\u{1b}Z",
            // Printers, sizes in band, the preferred character set, saved modes, colors that change.
            "\u{1b}[5i",
            "\u{1b}[?5i",
            "\u{1b}[i",
            "\u{1b}[?2048h",
            "\u{1b}[?25;2048h",
            "\u{1b}[?2031h",
            "\u{1b}[&u",
            "\u{1b}[?1000r",
            "\u{1b}[20h",
            "\u{1b}[1;2;3;4;5T",
            "\u{1b}[1 F",
            "\u{1b}%@",
            "\u{1b} G",
            "\u{5}",
            "\u{85}",
            "\u{1b}[1\u{1b}[6n",
        ] {
            let whole = Filter::default().pass(format!("a{hostile}b").as_bytes());
            // A string ends at U+009C in some terminals and not in others: then what follows is left out.
            let shown = String::from_utf8_lossy(&whole);
            assert!(
                shown == "ab" || (shown == "a" && hostile.ends_with('\u{9c}')),
                "{hostile:?}: {shown:?}"
            );
            // The same, in pieces.
            let mut filter = Filter::default();
            let pieces: Vec<u8> = format!("a{hostile}b")
                .bytes()
                .flat_map(|b| filter.pass(&[b]))
                .collect();
            assert_eq!(pieces, whole, "{hostile:?}");
        }
    }

    #[test]
    fn a_sequence_without_an_end_takes_no_memory() {
        let mut filter = Filter::default();
        for start in ["\u{1b}[", "\u{1b}(", "\u{1b}]"] {
            filter.pass(start.as_bytes());
            let long = if start == "\u{1b}(" { b"(" } else { b"1" };
            assert!(filter.pass(&long.repeat(100_000)).len() <= 100_000);
            assert!(filter.held.len() <= MAX_SEQUENCE + 1);
            filter.pass(b"\x18");
        }
        assert_eq!(filter.pass(b"x"), b"x");
        let mut long = b"\x1b[".to_vec();
        long.extend(b"1;".repeat(100));
        long.extend(b"mx");
        assert_eq!(Filter::default().pass(&long), b"x");
    }

    #[test]
    fn bytes_that_are_no_text_are_left_out() {
        let mixed = b"a\x9b6n\xc3\xa9\xe4\xbd\xa0\x85\xf0\x9f\x98\x80\x9d0;t\x07b";
        let shown = Filter::default().pass(mixed);
        assert_eq!(
            String::from_utf8(shown).unwrap(),
            "a6n\u{e9}\u{4f60}\u{1f600}0;t\u{7}b"
        );
    }
}
