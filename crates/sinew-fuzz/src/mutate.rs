//! Mutations of inputs with a fixed seed.
//!
//! They know nothing of the code that they test, unlike those of libFuzzer. They find what is near to valid
//! inputs, and they are the same on every machine, so that a test run neither fails by chance nor takes
//! longer by chance. One to five changes are made to an input, because most inputs with many changes are
//! refused at their start.

use sinew_types::SplitMix64;

/// Maximum bytes of a mutation.
const MAX_BYTES: usize = 1 << 16;
/// Maximum changes of one input.
const MAX_CHANGES: u64 = 5;

/// An endless sequence of mutations, the same for the same seed, inputs and words.
#[derive(Debug)]
pub struct Mutations<'a> {
    /// Source of all choices.
    random: SplitMix64,
    /// Inputs to change, at least one.
    inputs: &'a [Vec<u8>],
    /// Texts to insert. None: bytes are inserted alone.
    words: &'a [&'a str],
}

impl<'a> Mutations<'a> {
    /// Creates mutations of `inputs` in which `words` are inserted from time to time.
    pub fn new(seed: u64, inputs: &'a [Vec<u8>], words: &'a [&'a str]) -> Self {
        Self {
            random: SplitMix64::new(seed),
            inputs,
            words,
        }
    }

    /// A number below `end`; 0 if `end` is 0.
    fn below(&mut self, end: usize) -> usize {
        (self.random.next_u64() % (end.max(1) as u64)) as usize
    }

    /// A part of `bytes` of at most 64 bytes, by start and end.
    fn part(&mut self, bytes: &[u8]) -> (usize, usize) {
        let start = self.below(bytes.len() + 1);
        let len = self.below(65).min(bytes.len() - start);
        (start, start + len)
    }

    /// Changes a place: a bit, a byte, a part removed, copied, or taken from another input, a word, or the
    /// end cut off.
    fn change(&mut self, bytes: &mut Vec<u8>) {
        let at = self.below(bytes.len() + 1);
        let (start, end) = self.part(bytes);
        match self.below(8) {
            0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
            1 if at < bytes.len() => {
                // Numbers at the ends of their ranges, and bytes that end or escape texts.
                let edges = [0, 1, 0x7f, 0x80, 0xff, b'"', b'\\', b'\n', b'{', b'}'];
                bytes[at] = edges[self.below(edges.len())];
            }
            2 => drop(bytes.drain(start..end)),
            3 => {
                let copy = bytes[start..end].to_vec();
                bytes.splice(at..at, copy);
            }
            4 if !self.words.is_empty() => {
                let word = self.words[self.below(self.words.len())];
                bytes.splice(at..at, word.bytes());
            }
            5 => {
                let other = &self.inputs[self.below(self.inputs.len())];
                let (start, end) = self.part(other);
                bytes.splice(at..at, other[start..end].iter().copied());
            }
            6 => bytes.truncate(at),
            _ => {
                let byte = self.random.next_u64() as u8;
                bytes.insert(at, byte);
            }
        }
        bytes.truncate(MAX_BYTES);
    }
}

impl Iterator for Mutations<'_> {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        let at = self.below(self.inputs.len());
        let mut bytes = self.inputs.get(at)?.clone();
        for _ in 0..=self.random.next_u64() % MAX_CHANGES {
            self.change(&mut bytes);
        }
        Some(bytes)
    }
}
