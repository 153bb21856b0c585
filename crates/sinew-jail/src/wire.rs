//! Messages between the host and the agent. One frame: kind (one byte), length of the payload (four bytes,
//! little-endian), payload. The agent and its client compile this same file.

/// Version of this protocol; the agent's first frame carries it.
pub const VERSION: u32 = 2;
/// Largest payload towards the agent.
pub const MAX_REQUEST: usize = 1 << 20;
/// Largest payload from the agent, which hostile code may have taken over.
pub const MAX_REPLY: usize = 40 << 10;
/// Bytes of content in one frame, at most.
pub const CHUNK: usize = 32 << 10;
/// Bytes before the payload.
pub const HEAD: usize = 5;

/// Limits in SETUP with this number are for all programs together: memory and processes.
pub const TOGETHER: u64 = u64::MAX;

/// Requests.
pub mod ask {
    /// Walls, user, interpreter: once, before anything else.
    pub const SETUP: u8 = 1;
    /// Runs a program; standard input follows as DATA and END.
    pub const EXEC: u8 = 2;
    /// Content of standard input or of a file.
    pub const DATA: u8 = 3;
    /// No more content.
    pub const END: u8 = 4;
    /// Kills what runs.
    pub const KILL: u8 = 5;
    /// Makes a file (content follows), a folder or a link below the work folder. Not answered.
    pub const PUT: u8 = 6;
    /// Request for the result of all PUT requests since the last one.
    pub const SYNC: u8 = 7;
    /// Sends a file.
    pub const READ: u8 = 8;
    /// Request for everything below the work folder, if its files have at most the given number of bytes.
    pub const ARCHIVE: u8 = 9;
    /// Removes all files.
    pub const RESET: u8 = 10;
    /// Counts files and processes.
    pub const STATS: u8 = 11;
    /// Sets clock, entropy and name after a virtual machine was restored.
    pub const RESUME: u8 = 12;
    /// Opens the folder below which the PUT requests until the next SYNC go, with a writable root.
    pub const PLACE: u8 = 13;
    /// Sends the entries below any folder, or a file, with a writable root.
    pub const FETCH: u8 = 14;
}

/// Answers.
pub mod tell {
    /// The first frame: version, landlock version, last capability.
    pub const HELLO: u8 = 1;
    /// A piece of standard output.
    pub const STDOUT: u8 = 2;
    /// A piece of standard error.
    pub const STDERR: u8 = 3;
    /// A piece of a file.
    pub const DATA: u8 = 4;
    /// An entry of an archive; its content follows.
    pub const ENTRY: u8 = 5;
    /// All processes of the execution are gone.
    pub const ENDED: u8 = 6;
    /// A request is done.
    pub const DONE: u8 = 7;
    /// A request failed: step, errno, text.
    pub const FAILED: u8 = 8;
}

/// Kinds of files.
pub mod file {
    /// A file with content.
    pub const REGULAR: u8 = 0;
    /// A folder with entries.
    pub const FOLDER: u8 = 1;
    /// A symbolic link.
    pub const LINK: u8 = 2;
}

/// Reason why the agent ended an execution.
pub mod cut {
    /// The agent did not end it.
    pub const NONE: u8 = 0;
    /// The deadline passed.
    pub const DEADLINE: u8 = 1;
    /// Too much output.
    pub const OUTPUT: u8 = 2;
    /// The host asked.
    pub const ASKED: u8 = 3;
}

/// A payload, or a whole frame, as it grows.
#[derive(Debug, Default)]
pub struct Put(pub Vec<u8>);

impl Put {
    /// Starts a frame; [`Put::frame`] ends it.
    pub fn of(kind: u8) -> Self {
        Self(vec![kind, 0, 0, 0, 0])
    }

    /// One byte.
    pub fn byte(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }

    /// A number.
    pub fn number(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    /// Bytes and how many they are.
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0
            .extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        self.0.extend_from_slice(bytes);
        self
    }

    /// Texts and how many they are.
    pub fn list<T: AsRef<[u8]>>(mut self, list: &[T]) -> Self {
        self.0.extend_from_slice(&(list.len() as u32).to_le_bytes());
        for item in list {
            self = self.bytes(item.as_ref());
        }
        self
    }

    /// The frame with its length filled in.
    pub fn frame(mut self) -> Vec<u8> {
        let len = (self.0.len() - HEAD) as u32;
        self.0[1..HEAD].copy_from_slice(&len.to_le_bytes());
        self.0
    }
}

/// A frame of raw content.
pub fn content(kind: u8, bytes: &[u8]) -> Vec<u8> {
    let mut put = Put::of(kind);
    put.0.extend_from_slice(bytes);
    put.frame()
}

/// Kind and length of a frame that starts with these bytes.
pub fn head(bytes: &[u8; HEAD]) -> (u8, usize) {
    let len = u32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]);
    (bytes[0], len as usize)
}

/// Parser of a payload; every step is checked.
#[derive(Debug)]
pub struct Take<'a>(pub &'a [u8]);

impl<'a> Take<'a> {
    fn some(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    /// One byte.
    pub fn byte(&mut self) -> Option<u8> {
        self.some(1).map(|b| b[0])
    }

    /// A number.
    pub fn number(&mut self) -> Option<u64> {
        let bytes = self.some(8)?;
        bytes.try_into().ok().map(u64::from_le_bytes)
    }

    fn count(&mut self) -> Option<usize> {
        let bytes = self.some(4)?;
        bytes
            .try_into()
            .ok()
            .map(|b| u32::from_le_bytes(b) as usize)
    }

    /// Bytes.
    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let count = self.count()?;
        self.some(count)
    }

    /// Texts.
    pub fn list(&mut self) -> Option<Vec<Vec<u8>>> {
        let count = self.count()?;
        // Each has at least its length.
        if count > self.0.len() / 4 {
            return None;
        }
        (0..count)
            .map(|_| self.bytes().map(<[u8]>::to_vec))
            .collect()
    }
}
