//! Archives on their way between levels and hosts.

pub use sinew_jail::archive::{BLOCK, Content, Held, Writer, fill, reader};
use std::io::{self, Read, Seek, SeekFrom, Write};

/// A file on disk without a name, for content that is too large for memory; it goes with its last descriptor.
/// `TMPDIR` names the folder.
///
/// # Errors
/// If there is no room for it.
pub fn spool(bytes: &[u8]) -> io::Result<std::fs::File> {
    let mut file = tempfile::tempfile()?;
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file)
}

/// All of a file that has at most `max_bytes`, from its beginning.
///
/// # Errors
/// If it cannot be read, or is larger.
pub fn unspool(file: &std::fs::File, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut file = file;
    file.seek(SeekFrom::Start(0))?;
    let mut bytes = Vec::new();
    file.take(max_bytes.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        Err(io::Error::other(format!(
            "it is larger than {max_bytes} bytes"
        )))
    } else {
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_comes_back_up_to_its_bound() {
        let file = spool(b"12345").unwrap();
        assert_eq!(unspool(&file, 5).unwrap(), b"12345");
        assert!(unspool(&file, 4).is_err());
    }
}
