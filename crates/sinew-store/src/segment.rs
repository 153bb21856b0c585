//! Segment files: numbered, append-only, bounded in size.
//!
//! A file is a 16-byte header and frames. A frame holds the data of one commit: header (magic, number of
//! records, length and CRC-32 of the body) and records, each with its own header (kind, codec, lengths,
//! CRC-32), so that it can be read separately. All numbers are little-endian.
//!
//! | part | bytes |
//! |---|---|
//! | file header | magic 8, format 4, number 4 |
//! | frame header | magic 4, records 4, length of the body 4, CRC-32 of these two and the body 4 |
//! | record header | kind 1, codec 1, zero 2, length before compression 4, length 4, CRC-32 4 |
//!
//! An append is acknowledged after `fdatasync` of the file has returned. The name of a new file is made
//! durable before that. A failed append is cut off again; if that fails too, the writer continues in a new
//! file. It does so, too, if another process has written to its file, which the store's lock prevents on one
//! host and may not prevent on a file system of several hosts.

use crate::codec::Encoded;
use crate::error::{RecordError, StoreError};
use crate::private::{private_dir, private_file};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// First bytes of a file: `b"SINEWSEG"`; the format version and the file's number follow.
const FILE_MAGIC: &[u8; 8] = b"SINEWSEG";
/// Version of the layout of headers and frames, and of the kinds and codecs of records. Files of another
/// format are refused.
const FORMAT: u32 = 4;
/// Bytes of the file header.
pub(crate) const FILE_HEADER: u64 = 16;
/// Magic number at the start of a frame, which the scan searches after damage.
pub(crate) const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"FRAM");
/// Bytes of a frame header.
pub(crate) const FRAME_HEADER: usize = 16;
/// Bytes of a record header.
pub(crate) const RECORD_HEADER: usize = 16;

/// Content of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordKind {
    /// A trace of an episode.
    Trace = 1,
    /// An update, see [`crate::codec::Mark`].
    Mark = 2,
    /// A score, see [`crate::ScoreRecord`].
    Score = 3,
}

impl RecordKind {
    /// Returns the kind for the first byte of a record header.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [Self::Trace, Self::Mark, Self::Score]
            .into_iter()
            .find(|k| *k as u8 == code)
    }
}

/// Location of a record in the segment files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    /// Number of the file.
    pub(crate) segment: u32,
    /// Offset of the record's header in the file.
    pub(crate) offset: u64,
    /// Length in bytes, header and payload together.
    pub(crate) bytes: u32,
}

/// A record that was read and verified.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    /// Kind of the payload.
    pub(crate) kind: RecordKind,
    pub(crate) codec: u8,
    /// Payload length before compression.
    pub(crate) raw_len: u32,
    /// Payload as stored, compressed or not.
    pub(crate) payload: Vec<u8>,
    pub(crate) location: Location,
}

/// A frame that is being built.
#[derive(Debug, Default)]
pub(crate) struct Frame {
    /// The records with their headers, one after the other.
    body: Vec<u8>,
    /// Offset (from the start of the frame header) and length of each record.
    records: Vec<(u64, u32)>,
}

impl Frame {
    /// Adds a record.
    pub(crate) fn push(&mut self, kind: RecordKind, encoded: &Encoded) {
        self.push_parts(kind, encoded.codec as u8, encoded.raw_len, &encoded.bytes);
    }

    /// Adds a record with an encoded payload.
    pub(crate) fn push_parts(&mut self, kind: RecordKind, codec: u8, raw_len: u32, bytes: &[u8]) {
        let start = self.body.len();
        self.body.extend([kind as u8, codec, 0, 0]);
        self.body.extend(raw_len.to_le_bytes());
        self.body.extend((bytes.len() as u32).to_le_bytes());
        let crc = record_crc(&self.body[start..], bytes);
        self.body.extend(crc.to_le_bytes());
        self.body.extend(bytes);
        let length = (self.body.len() - start) as u32;
        self.records.push(((FRAME_HEADER + start) as u64, length));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Length of the frame in the file.
    pub(crate) fn len(&self) -> u64 {
        (FRAME_HEADER + self.body.len()) as u64
    }

    /// Returns the frame with its header, as it is written.
    fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(FRAME_HEADER + self.body.len());
        out.extend(FRAME_MAGIC.to_le_bytes());
        out.extend((self.records.len() as u32).to_le_bytes());
        out.extend((self.body.len() as u32).to_le_bytes());
        let crc = record_crc(&out[4..12], &self.body);
        out.extend(crc.to_le_bytes());
        out.extend(&self.body);
        out
    }
}

/// Returns the CRC-32 of a header without its checksum, followed by the payload.
pub(crate) fn record_crc(header: &[u8], payload: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(header);
    crc.update(payload);
    crc.finalize()
}

/// Reads a little-endian number at `at`.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The directory of segment files.
#[derive(Clone, Debug)]
pub(crate) struct SegmentDir {
    /// Path of the directory.
    path: PathBuf,
}

impl SegmentDir {
    /// Opens the directory, or creates it.
    pub(crate) fn open(path: PathBuf) -> Result<Self, StoreError> {
        private_dir(&path).map_err(|e| StoreError::io(&path, e))?;
        Ok(Self { path })
    }

    /// Opens a directory for reading only.
    pub(crate) fn existing(path: PathBuf) -> Self {
        Self { path }
    }

    /// Returns the path of a segment: its file name is the number with eight digits.
    pub(crate) fn path_of(&self, segment: u32) -> PathBuf {
        self.path.join(format!("{segment:08}.seg"))
    }

    /// Returns the numbers and lengths of the existing files, in ascending order.
    pub(crate) fn list(&self) -> Result<Vec<(u32, u64)>, StoreError> {
        let error = |e| StoreError::io(&self.path, e);
        let mut out = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(error)? {
            let entry = entry.map_err(error)?;
            let name = entry.file_name();
            let number = name.to_str().and_then(|n| n.strip_suffix(".seg"));
            let Some(number) = number.and_then(|n| n.parse().ok()) else {
                continue;
            };
            match entry.metadata() {
                Ok(file) => out.push((number, file.len())),
                // Gc of the process that writes the store has removed it since.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(error(e)),
            }
        }
        out.sort_unstable();
        Ok(out)
    }

    /// Removes a file durably; a missing file is not an error.
    pub(crate) fn remove(&self, segment: u32) -> Result<(), StoreError> {
        let path = self.path_of(segment);
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(StoreError::io(&path, e)),
            _ => self.sync(),
        }
    }

    /// Makes the file names durable.
    fn sync(&self) -> Result<(), StoreError> {
        let directory = File::open(&self.path).and_then(|d| d.sync_all());
        directory.map_err(|e| StoreError::io(&self.path, e))
    }

    /// Reads and verifies one record.
    pub(crate) fn read(&self, at: Location) -> Result<Record, StoreError> {
        let path = self.path_of(at.segment);
        let file = File::open(&path).map_err(|e| StoreError::io(&path, e))?;
        let mut bytes = vec![0; at.bytes as usize];
        file.read_exact_at(&mut bytes, at.offset)
            .map_err(|e| match e.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    corrupt(&path, at.offset, RecordError::Bytes("the file ends"))
                }
                _ => StoreError::io(&path, e),
            })?;
        parse_record(&bytes, at).map_err(|reason| corrupt(&path, at.offset, reason))
    }

    /// Writes the header of a file again.
    pub(crate) fn restore_header(&self, segment: u32) -> Result<(), StoreError> {
        let path = self.path_of(segment);
        let file = OpenOptions::new().write(true).open(&path);
        let written = file.and_then(|file| {
            file.write_all_at(&file_header(segment), 0)?;
            file.sync_all()
        });
        written.map_err(|e| StoreError::io(&path, e))
    }
}

/// Returns the 16-byte header of a file.
fn file_header(segment: u32) -> Vec<u8> {
    let mut header = FILE_MAGIC.to_vec();
    header.extend(FORMAT.to_le_bytes());
    header.extend(segment.to_le_bytes());
    header
}

/// Returns the error for unreadable bytes.
pub(crate) fn corrupt(path: &Path, offset: u64, reason: RecordError) -> StoreError {
    StoreError::Corrupt {
        path: path.to_owned(),
        offset,
        reason,
    }
}

/// State of a file's header.
pub(crate) enum Header {
    /// The magic number, format and file number are correct.
    Sound,
    /// The file has another format; contains the error.
    Other(StoreError),
    /// The header has any other defect.
    Damaged,
}

/// Checks the first 16 bytes of a file.
pub(crate) fn check_header(path: &Path, header: &[u8], segment: u32) -> Header {
    if &header[..8] != FILE_MAGIC || u32_at(header, 12) != segment {
        return Header::Damaged;
    }
    match u32_at(header, 8) {
        FORMAT => Header::Sound,
        0 => Header::Damaged,
        format => Header::Other(StoreError::Format {
            path: path.to_owned(),
            actual: i64::from(format),
            expected: i64::from(FORMAT),
        }),
    }
}

/// Parses and verifies a record.
///
/// # Errors
/// The faulty part.
pub(crate) fn parse_record(bytes: &[u8], location: Location) -> Result<Record, RecordError> {
    if bytes.len() < RECORD_HEADER {
        return Err(RecordError::Bytes("record is shorter than its header"));
    }
    let (header, payload) = bytes.split_at(RECORD_HEADER);
    if u32_at(header, 8) as usize != payload.len() {
        return Err(RecordError::Bytes("record has another length"));
    }
    if record_crc(&header[..12], payload) != u32_at(header, 12) {
        return Err(RecordError::Bytes("checksum does not match"));
    }
    Ok(Record {
        kind: RecordKind::from_code(header[0]).ok_or(RecordError::Kind(header[0]))?,
        codec: header[1],
        raw_len: u32_at(header, 4),
        payload: payload.to_vec(),
        location,
    })
}

/// Writer that appends to the newest file.
#[derive(Debug)]
pub(crate) struct Writer {
    /// Folder for new files.
    directory: SegmentDir,
    /// Number of the file being written.
    segment: u32,
    /// The open file; `None` until the first append.
    file: Option<File>,
    /// Number of acknowledged bytes.
    length: u64,
    /// Size that a frame must not exceed in a file with other frames, see
    /// [`crate::StoreOptions::segment_bytes`].
    limit: u64,
    #[cfg(test)]
    pub(crate) fault: Option<Fault>,
}

/// A medium that fails.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// No space left after so many bytes of a frame.
    FullAfter(usize),
    /// The data is written, but the medium does not confirm it, nor takes it back.
    SyncFails,
}

impl Writer {
    /// Creates a writer that appends to `segment` after `length` bytes, or starts the file if `length` is 0.
    pub(crate) fn new(directory: SegmentDir, segment: u32, length: u64, limit: u64) -> Self {
        Self {
            directory,
            segment,
            file: None,
            length,
            limit,
            #[cfg(test)]
            fault: None,
        }
    }

    /// Number of the file that the next frame is written to.
    pub(crate) fn segment(&self) -> u32 {
        self.segment
    }

    /// Number of acknowledged bytes of that file.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Leaves the file unchanged and continues in a new one.
    pub(crate) fn abandon(&mut self) {
        self.segment += 1;
        self.file = None;
        self.length = 0;
    }

    /// Writes a frame and waits until it is durable. Returns the locations of its records.
    pub(crate) fn append(&mut self, frame: &Frame) -> Result<Vec<Location>, StoreError> {
        if self.length > FILE_HEADER && self.length + frame.len() > self.limit {
            self.abandon();
        }
        self.prepare()?;
        if self.is_foreign()? {
            self.abandon();
            self.prepare()?;
        }
        let start = self.length;
        if let Err(error) = self.write_and_sync(&frame.to_bytes()) {
            self.take_back(start);
            return Err(error);
        }
        self.length = start + frame.len();
        let segment = self.segment;
        let locate = |&(offset, bytes): &(u64, u32)| Location {
            segment,
            offset: start + offset,
            bytes,
        };
        Ok(frame.records.iter().map(locate).collect())
    }

    /// Removes the last append. If that fails, the file is left unchanged; its unacknowledged bytes are
    /// indexed or cut off when the store is opened.
    pub(crate) fn take_back(&mut self, length: u64) {
        let truncate = |file: &File| file.set_len(length).and_then(|()| file.sync_data());
        #[cfg(test)]
        let truncate = |file: &File| match self.fault {
            Some(Fault::SyncFails) => Err(std::io::Error::other("injected")),
            _ => truncate(file),
        };
        let truncated = match &self.file {
            Some(file) if length >= FILE_HEADER => truncate(file),
            _ => Ok(()),
        };
        match truncated {
            Ok(()) => self.length = length,
            Err(_) => self.abandon(),
        }
    }

    /// Whether another process has changed the length of the open file.
    fn is_foreign(&self) -> Result<bool, StoreError> {
        let Some(file) = &self.file else {
            return Ok(false);
        };
        let path = self.directory.path_of(self.segment);
        let metadata = file.metadata().map_err(|e| StoreError::io(&path, e))?;
        Ok(metadata.len() != self.length)
    }

    /// Whether the file to be created exists already with frames.
    fn is_taken(&self) -> bool {
        let path = self.directory.path_of(self.segment);
        std::fs::metadata(path).is_ok_and(|file| file.len() > FILE_HEADER)
    }

    /// Opens the file, or creates a new one with its header and a durable name.
    fn prepare(&mut self) -> Result<(), StoreError> {
        if self.file.is_some() {
            return Ok(());
        }
        let fresh = self.length == 0;
        while fresh && self.is_taken() {
            self.segment += 1;
        }
        let path = self.directory.path_of(self.segment);
        let error = |e| StoreError::io(&path, e);
        let mut options = private_file();
        options.read(true).write(true).create(fresh).truncate(fresh);
        let mut file = options.open(&path).map_err(error)?;
        if fresh {
            file.write_all(&file_header(self.segment)).map_err(error)?;
            file.sync_all().map_err(error)?;
            self.directory.sync()?;
            self.length = FILE_HEADER;
        }
        self.file = Some(file);
        Ok(())
    }

    /// Writes after the acknowledged bytes and waits until the data is durable.
    fn write_and_sync(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.directory.path_of(self.segment);
        let error = |e| StoreError::io(&path, e);
        let Some(file) = &self.file else {
            return Err(error(std::io::ErrorKind::NotFound.into()));
        };
        #[cfg(test)]
        if let Some(Fault::FullAfter(n)) = self.fault {
            let part = &bytes[..n.min(bytes.len())];
            file.write_all_at(part, self.length).map_err(error)?;
            return Err(error(std::io::ErrorKind::StorageFull.into()));
        }
        file.write_all_at(bytes, self.length).map_err(error)?;
        #[cfg(test)]
        if self.fault == Some(Fault::SyncFails) {
            return Err(error(std::io::Error::other("injected")));
        }
        file.sync_data().map_err(error)
    }
}
