//! Reads a segment file from start to end, and skips unreadable parts.
//!
//! A frame is recognized by its magic, its lengths and its checksums. After an unreadable frame, the scan
//! searches the next complete one: first at the end that its header or records state, then byte by byte.

use crate::error::{RecordError, StoreError};
use crate::segment::{
    FILE_HEADER, FRAME_HEADER, FRAME_MAGIC, Header, Location, RECORD_HEADER, Record, RecordKind,
    SegmentDir, check_header, corrupt, parse_record, record_crc, u32_at,
};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Number of bytes that one read of the search loads.
const WINDOW: usize = 1 << 20;

/// Sector size in bytes. A disk writes whole sectors, so a torn write misses at least one.
const SECTOR: u64 = 512;

/// Content of a segment file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Scan {
    /// Offset of the end of the last complete frame.
    pub(crate) end: u64,
    /// Byte ranges (start, end) before `end` without an intact frame. A damaged file header counts as one.
    pub(crate) gaps: Vec<(u64, u64)>,
}

impl SegmentDir {
    /// Passes the records of the complete frames from `from` on to `each`, in order. From incomplete
    /// frames, intact records are passed if a complete frame follows. With `any_format`, a header of
    /// another format is a gap instead of an error.
    pub(crate) fn scan(
        &self,
        segment: u32,
        from: u64,
        any_format: bool,
        mut each: impl FnMut(Record) -> Result<(), StoreError>,
    ) -> Result<Scan, StoreError> {
        let file = Segment::open(self, segment)?;
        let mut scan = Scan::default();
        if file.length < FILE_HEADER {
            return Ok(scan);
        }
        if !file.is_sound(any_format)? {
            scan.gaps.push((0, FILE_HEADER));
        }
        let mut at = from.max(FILE_HEADER);
        scan.end = at;
        loop {
            if let Some((records, next)) = file.frame(at)? {
                records.into_iter().try_for_each(&mut each)?;
                (at, scan.end) = (next, next);
                continue;
            }
            let Some(next) = file.next_frame(at)? else {
                return Ok(scan);
            };
            let whole = file.whole_records(at, next)?;
            whole.into_iter().try_for_each(&mut each)?;
            scan.gaps.push((at, next));
            at = next;
        }
    }

    /// Whether the header of a file is intact. An incomplete header is not damage.
    pub(crate) fn has_header(&self, segment: u32, any_format: bool) -> Result<bool, StoreError> {
        let file = Segment::open(self, segment)?;
        Ok(file.length < FILE_HEADER || file.is_sound(any_format)?)
    }

    /// Whether the end of a file after `at`, which contains no complete frame, looks like an unfinished
    /// write: a frame that is cut short or misses whole sectors. Nothing is ever written after an unfinished
    /// frame.
    pub(crate) fn looks_torn(&self, segment: u32, at: u64) -> Result<bool, StoreError> {
        let file = Segment::open(self, segment)?;
        if file.length < FILE_HEADER || at + FRAME_HEADER as u64 > file.length {
            return Ok(true);
        }
        let header = file.bytes(at, FRAME_HEADER)?;
        if u32_at(&header, 0) != FRAME_MAGIC {
            // The header means nothing if it was not written.
            return Ok(header.iter().all(|b| *b == 0));
        }
        if u32_at(&header, 4) == 0 || u32_at(&header, 8) == 0 {
            // No frame is empty: the header lies in two sectors, of which one was written.
            return Ok(true);
        }
        let own_end = at + FRAME_HEADER as u64 + u64::from(u32_at(&header, 8));
        match own_end.cmp(&file.length) {
            std::cmp::Ordering::Greater => Ok(true),
            std::cmp::Ordering::Equal => file.misses_sectors(at),
            std::cmp::Ordering::Less => Ok(false),
        }
    }
}

/// An open segment file whose contents are not trusted.
struct Segment {
    /// Open for reading.
    file: File,
    /// Path, for messages.
    path: PathBuf,
    /// Segment number that the file's header must name.
    number: u32,
    /// Length of the file when it was opened; a writer may append meanwhile.
    length: u64,
}

impl Segment {
    /// Opens a file without reading it.
    fn open(directory: &SegmentDir, number: u32) -> Result<Self, StoreError> {
        let path = directory.path_of(number);
        let error = |e| StoreError::io(&path, e);
        let file = File::open(&path).map_err(error)?;
        let length = file.metadata().map_err(error)?.len();
        Ok(Self {
            file,
            path,
            number,
            length,
        })
    }

    /// Reads `count` bytes of the file at `at`.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if the file ends before.
    fn bytes(&self, at: u64, count: usize) -> Result<Vec<u8>, StoreError> {
        let mut bytes = vec![0; count];
        let read = self.file.read_exact_at(&mut bytes, at);
        read.map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => {
                corrupt(&self.path, at, RecordError::Bytes("the file ends"))
            }
            _ => StoreError::io(&self.path, e),
        })?;
        Ok(bytes)
    }

    /// Whether the header is intact. With `any_format`, a header of another format counts as damaged instead
    /// of being an error.
    fn is_sound(&self, any_format: bool) -> Result<bool, StoreError> {
        let header = self.bytes(0, FILE_HEADER as usize)?;
        match check_header(&self.path, &header, self.number) {
            Header::Sound => Ok(true),
            Header::Other(refused) if !any_format => Err(refused),
            Header::Other(_) | Header::Damaged => Ok(false),
        }
    }

    /// Returns the records of the frame that starts at `at`, and its end; `None` if no complete frame starts
    /// there.
    fn frame(&self, at: u64) -> Result<Option<(Vec<Record>, u64)>, StoreError> {
        if at + FRAME_HEADER as u64 > self.length {
            return Ok(None);
        }
        let header = self.bytes(at, FRAME_HEADER)?;
        let body_len = u64::from(u32_at(&header, 8));
        let next = at + FRAME_HEADER as u64 + body_len;
        let count = u64::from(u32_at(&header, 4));
        let fits = next <= self.length && count > 0 && count * RECORD_HEADER as u64 <= body_len;
        if u32_at(&header, 0) != FRAME_MAGIC || !fits {
            return Ok(None);
        }
        let start = at + FRAME_HEADER as u64;
        let body = self.bytes(start, body_len as usize)?;
        if record_crc(&header[4..12], &body) != u32_at(&header, 12) {
            return Ok(None);
        }
        let mut records = Vec::new();
        let mut from = 0;
        for _ in 0..count {
            let Some(record) = self.record(&body[from..], start + from as u64) else {
                return Ok(None);
            };
            from += record.location.bytes as usize;
            records.push(record);
        }
        Ok((from == body.len()).then_some((records, next)))
    }

    /// Parses the record at the start of `bytes`, which are at `offset` in the file.
    fn record(&self, bytes: &[u8], offset: u64) -> Option<Record> {
        let header = bytes.get(..RECORD_HEADER)?;
        let end = RECORD_HEADER.checked_add(u32_at(header, 8) as usize)?;
        let location = Location {
            segment: self.number,
            offset,
            bytes: u32::try_from(end).ok()?,
        };
        parse_record(bytes.get(..end)?, location).ok()
    }

    /// Returns the offset of the next complete frame after the damaged one at `at`.
    fn next_frame(&self, at: u64) -> Result<Option<u64>, StoreError> {
        if at + FRAME_HEADER as u64 > self.length {
            return Ok(None);
        }
        let header = self.bytes(at, FRAME_HEADER)?;
        let own_end = at + FRAME_HEADER as u64 + u64::from(u32_at(&header, 8));
        let records = self.hop(at + FRAME_HEADER as u64, self.length)?;
        for hint in [own_end, records.1] {
            if hint > at && self.frame(hint)?.is_some() {
                return Ok(Some(hint));
            }
        }
        self.search(at + 1)
    }

    /// Returns the offset of the next complete frame from `from` on; it searches for the magic number, one
    /// window at a time.
    fn search(&self, from: u64) -> Result<Option<u64>, StoreError> {
        let mut at = from;
        while at + FRAME_HEADER as u64 <= self.length {
            let count = WINDOW.min((self.length - at) as usize);
            let window = self.bytes(at, count)?;
            let magic = FRAME_MAGIC.to_le_bytes();
            for (i, _) in window.windows(4).enumerate().filter(|(_, w)| *w == magic) {
                if self.frame(at + i as u64)?.is_some() {
                    return Ok(Some(at + i as u64));
                }
            }
            at += count as u64 - 3;
        }
        Ok(None)
    }

    /// Returns intact records between `from`, the start of a damaged frame, and `to`.
    fn whole_records(&self, from: u64, to: u64) -> Result<Vec<Record>, StoreError> {
        Ok(self.hop(from + FRAME_HEADER as u64, to)?.0)
    }

    /// Follows the record headers; returns intact records, and the end of the last one.
    fn hop(&self, from: u64, to: u64) -> Result<(Vec<Record>, u64), StoreError> {
        let (mut whole, mut at, mut end) = (Vec::new(), from, from);
        while at + RECORD_HEADER as u64 <= to {
            let header = self.bytes(at, RECORD_HEADER)?;
            if u32_at(&header, 0) == FRAME_MAGIC {
                at += FRAME_HEADER as u64;
                continue;
            }
            let next = at + RECORD_HEADER as u64 + u64::from(u32_at(&header, 8));
            let known = RecordKind::from_code(header[0]).is_some() && header[2..4] == [0, 0];
            if !known || next > to {
                break;
            }
            let bytes = self.bytes(at, (next - at) as usize)?;
            if let Some(record) = self.record(&bytes, at) {
                whole.push(record);
                end = next;
            }
            at = next;
        }
        Ok((whole, end))
    }

    /// Whether a sector of the frame at `at`, or the partial sector at the end of the file, consists of
    /// zeros.
    fn misses_sectors(&self, at: u64) -> Result<bool, StoreError> {
        let mut from = at;
        while from < self.length {
            let to = ((from / SECTOR + 1) * SECTOR).min(self.length);
            let sector = self.bytes(from, (to - from) as usize)?;
            // A few zeros at either end may be the frame's own.
            if sector.len() >= FRAME_HEADER && sector.iter().all(|b| *b == 0) {
                return Ok(true);
            }
            from = to;
        }
        Ok(false)
    }
}
