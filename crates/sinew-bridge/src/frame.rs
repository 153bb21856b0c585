//! Frames between host and worker: four bytes of length, big-endian, then JSON.

/// Maximum bytes of one frame, without its length, in both directions.
pub const MAX_FRAME: usize = 16 << 20;
/// Bytes of the length.
const HEADER: usize = 4;

/// A frame that is too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a frame of {bytes} bytes: at most {max} are allowed")]
pub struct FrameError {
    /// Length of the frame.
    pub bytes: usize,
    /// Maximum length.
    pub max: usize,
}

/// A frame with its length.
///
/// # Errors
/// If `body` is longer than [`MAX_FRAME`].
pub fn encode(body: &[u8]) -> Result<Vec<u8>, FrameError> {
    if body.len() > MAX_FRAME {
        return Err(FrameError {
            bytes: body.len(),
            max: MAX_FRAME,
        });
    }
    let mut frame = Vec::with_capacity(HEADER + body.len());
    frame.extend_from_slice(&(body.len() as u32).to_be_bytes());
    frame.extend_from_slice(body);
    Ok(frame)
}

/// Cuts a stream of bytes into frames. It holds at most one incomplete frame and what was pushed after it.
#[derive(Clone, Debug, Default)]
pub struct FrameReader {
    buffer: Vec<u8>,
    /// Bytes of `buffer` that were returned.
    taken: usize,
}

impl FrameReader {
    /// Appends bytes as they come.
    pub fn push(&mut self, bytes: &[u8]) {
        // Frames that were returned leave before the buffer grows.
        self.buffer.drain(..self.taken);
        self.taken = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete frame without its length. `None` until more bytes come.
    ///
    /// # Errors
    /// If the length is above [`MAX_FRAME`], as soon as it is known. The stream is of no use after that.
    pub fn next_frame(&mut self) -> Result<Option<&[u8]>, FrameError> {
        let rest = &self.buffer[self.taken..];
        let Some((header, body)) = rest.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let bytes = u32::from_be_bytes(*header) as usize;
        if bytes > MAX_FRAME {
            return Err(FrameError {
                bytes,
                max: MAX_FRAME,
            });
        }
        if body.len() < bytes {
            return Ok(None);
        }
        let start = self.taken + HEADER;
        self.taken = start + bytes;
        Ok(Some(&self.buffer[start..self.taken]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All frames of a stream that comes in pieces of the given sizes.
    fn frames(stream: &[u8], sizes: &[usize]) -> Result<Vec<Vec<u8>>, FrameError> {
        let (mut reader, mut all, mut at) = (FrameReader::default(), Vec::new(), 0);
        let mut sizes = sizes.iter().cycle();
        while at < stream.len() {
            let end = (at + sizes.next().copied().unwrap_or(1).max(1)).min(stream.len());
            reader.push(&stream[at..end]);
            at = end;
            while let Some(frame) = reader.next_frame()? {
                all.push(frame.to_vec());
            }
        }
        Ok(all)
    }

    proptest! {
        #[test]
        fn frames_arrive_whole_however_the_stream_is_cut(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..20),
            sizes in prop::collection::vec(1usize..300, 1..10),
        ) {
            let stream: Vec<u8> = bodies.iter().flat_map(|b| encode(b).unwrap()).collect();
            prop_assert_eq!(frames(&stream, &sizes).unwrap(), bodies);
        }

        #[test]
        fn no_stream_makes_the_reader_panic_or_hold_more_than_it_got(
            stream in prop::collection::vec(any::<u8>(), 0..2000),
            sizes in prop::collection::vec(1usize..300, 1..10),
        ) {
            match frames(&stream, &sizes) {
                Ok(all) => prop_assert!(all.iter().map(|f| f.len() + HEADER).sum::<usize>() <= stream.len()),
                Err(e) => prop_assert!(e.bytes > MAX_FRAME),
            }
        }
    }

    #[test]
    fn a_length_above_the_limit_is_refused_before_its_bytes_come() {
        let mut reader = FrameReader::default();
        reader.push(&(MAX_FRAME as u32 + 1).to_be_bytes());
        assert!(reader.next_frame().is_err());
        assert!(encode(&vec![0; MAX_FRAME + 1]).is_err());
    }
}
