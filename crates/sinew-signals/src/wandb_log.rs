//! The log format of Weights & Biases: that of LevelDB with a header and CRC-32 in place of CRC-32C. Pure.
//!
//! Blocks of 32 KiB hold pieces; a record is one piece, or a first, middle and last ones. A piece is the
//! checksum of its type and data (4 bytes), the length of the data (2), its type (1), and the data, all
//! little endian. What is left of a block is zeros where no head of a piece fits. The file's own header
//! counts for the first block. Sources: `log_format.md` of LevelDB; `datastore.py` of wandb 0.26.

/// `:W&B`, a constant, and the version of the format.
pub(crate) const HEADER: [u8; 7] = [b':', b'W', b'&', b'B', 0xe1, 0xbe, 0];
const BLOCK: usize = 32 * 1024;
/// Checksum, length and type.
const HEAD: usize = 7;
/// Types of pieces.
const WHOLE: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

/// The place in a file that is written.
#[derive(Debug)]
pub(crate) struct Log {
    /// Within the block.
    at: usize,
}

impl Default for Log {
    /// Behind the header of a file.
    fn default() -> Self {
        Self { at: HEADER.len() }
    }
}

impl Log {
    /// Adds a record to what is written next.
    pub(crate) fn append(&mut self, record: &[u8], out: &mut Vec<u8>) {
        let (mut left, mut first) = (record, true);
        loop {
            let room = BLOCK - self.at;
            if room < HEAD {
                out.resize(out.len() + room, 0);
                self.at = 0;
                continue;
            }
            let (part, rest) = left.split_at(left.len().min(room - HEAD));
            let kind = match (first, rest.is_empty()) {
                (true, true) => WHOLE,
                (true, false) => FIRST,
                (false, false) => MIDDLE,
                (false, true) => LAST,
            };
            let mut crc = crc32fast::Hasher::new();
            crc.update(&[kind]);
            crc.update(part);
            out.extend_from_slice(&crc.finalize().to_le_bytes());
            // A part is smaller than a block.
            out.extend_from_slice(&(part.len() as u16).to_le_bytes());
            out.push(kind);
            out.extend_from_slice(part);
            self.at = (self.at + HEAD + part.len()) % BLOCK;
            (left, first) = (rest, false);
            if rest.is_empty() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a reader makes of the bytes behind the header.
    fn read(bytes: &[u8]) -> Vec<Vec<u8>> {
        let (mut records, mut at) = (Vec::<Vec<u8>>::new(), HEADER.len());
        let mut rest = bytes;
        while !rest.is_empty() {
            let room = BLOCK - at % BLOCK;
            if room < HEAD {
                let (zeros, more) = rest.split_at(room);
                assert!(zeros.iter().all(|b| *b == 0));
                (rest, at) = (more, at + room);
                continue;
            }
            let length = usize::from(u16::from_le_bytes([rest[4], rest[5]]));
            let (piece, more) = rest.split_at(HEAD + length);
            let crc = u32::from_le_bytes(piece[..4].try_into().unwrap());
            let mut hasher = crc32fast::Hasher::new();
            hasher.update(&piece[6..]);
            assert_eq!(crc, hasher.finalize());
            match piece[6] {
                WHOLE | FIRST => records.push(piece[HEAD..].to_vec()),
                _ => records
                    .last_mut()
                    .unwrap()
                    .extend_from_slice(&piece[HEAD..]),
            }
            (rest, at) = (more, at + piece.len());
            assert!(at % BLOCK == 0 || at / BLOCK == (at - piece.len()) / BLOCK);
        }
        records
    }

    proptest! {
        #[test]
        fn records_of_any_length_come_back(
            lengths in proptest::collection::vec(
                prop_oneof![0usize..100, 32_700usize..32_800, 60_000usize..100_000],
                1..12
            )
        ) {
            let (mut log, mut out) = (Log::default(), Vec::new());
            let record = |(i, n): (usize, &usize)| vec![i as u8; *n];
            let records: Vec<Vec<u8>> = lengths.iter().enumerate().map(record).collect();
            records.iter().for_each(|r| log.append(r, &mut out));
            prop_assert_eq!(read(&out), records);
        }
    }
}
