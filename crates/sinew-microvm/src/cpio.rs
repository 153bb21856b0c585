//! Archives of the "new ASCII" kind: the kernel unpacks several, one after the other, at boot.

/// One file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry<'a> {
    /// Path below the root, without a leading slash.
    pub(crate) path: &'a str,
    /// File type and permissions, as in `st_mode`.
    pub(crate) mode: u32,
    /// Bytes of the file, or the target of a link.
    pub(crate) content: &'a [u8],
}

/// Fills up to a multiple of four bytes, as the format requires after names and contents.
fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

/// Appends one entry with an inode number.
fn one(out: &mut Vec<u8>, number: u32, entry: Entry<'_>) {
    out.extend_from_slice(b"070701");
    let (name, size) = (entry.path.len() as u32 + 1, entry.content.len() as u32);
    // Inode, mode, owner, group, links, time, size, device, device it stands for, name, checksum.
    for field in [number, entry.mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name, 0] {
        out.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    out.extend_from_slice(entry.path.as_bytes());
    out.push(0);
    pad(out);
    out.extend_from_slice(entry.content);
    pad(out);
}

/// The archive; the same entries give the same bytes.
pub(crate) fn archive(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, entry) in entries.iter().enumerate() {
        one(&mut out, number as u32 + 1, *entry);
    }
    let end = Entry {
        path: "TRAILER!!!",
        mode: 0,
        content: b"",
    };
    one(&mut out, 0, end);
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_what_other_tools_read() {
        let entries = [
            Entry {
                path: "a/b",
                mode: 0o100_644,
                content: b"hello",
            },
            Entry {
                path: "link",
                mode: 0o120_777,
                content: b"a/b",
            },
        ];
        let bytes = archive(&entries);
        assert_eq!(bytes.len() % 512, 0);
        assert_eq!(&bytes[..6], b"070701");
        assert_eq!(&bytes[6..14], b"00000001");
        assert_eq!(&bytes[14..22], b"000081a4");
        let field = |i: usize| std::str::from_utf8(&bytes[6 + i * 8..14 + i * 8]).expect("digits");
        assert_eq!(field(6), "00000005");
        assert_eq!(field(11), "00000004");
        // 110 bytes of head and 4 of name, then the content.
        assert_eq!(&bytes[116..121], b"hello");
        assert!(bytes.windows(10).any(|w| w == b"TRAILER!!!"));
    }
}
