//! The kernel inside a bzImage, as monitors without firmware take it (`Documentation/x86/boot.rst`
//! of the kernel, fields 0x1f1 to 0x24c). Debian compresses it with LZ4, in its legacy frame:
//! blocks of at most 8 MiB, each with its length before it.

const MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
/// Largest kernel that is unpacked.
const MOST: usize = 256 << 20;

fn word(bytes: &[u8], at: usize) -> Option<usize> {
    let word = bytes.get(at..at + 4)?.try_into().ok()?;
    usize::try_from(u32::from_le_bytes(word)).ok()
}

/// The kernel as an ELF file.
///
/// # Errors
/// Part of the kernel's file that is not as expected.
pub(crate) fn unpack(image: &[u8]) -> Result<Vec<u8>, String> {
    let short = || "the kernel's image is cut".to_owned();
    let sectors = match image.get(0x1f1) {
        None => return Err(short()),
        Some(0) => 4,
        Some(&n) => usize::from(n),
    };
    let (offset, length) = (word(image, 0x248), word(image, 0x24c));
    let start = (sectors + 1) * 512 + offset.ok_or_else(short)?;
    let end = start + length.ok_or_else(short)?;
    let payload = image.get(start..end).ok_or_else(short)?;
    let mut rest = payload
        .strip_prefix(&MAGIC)
        .ok_or("the kernel is not compressed with LZ4")?;
    let mut out = Vec::new();
    // The size of the kernel follows the last block.
    while rest.len() > 4 {
        let size = word(rest, 0).ok_or_else(short)?;
        let compressed = rest.get(4..4 + size).ok_or_else(short)?;
        block(compressed, &mut out).ok_or("a block of the kernel is damaged")?;
        rest = &rest[4 + size..];
    }
    if !out.starts_with(b"\x7fELF") {
        return Err("what the image holds is no ELF file".into());
    }
    Ok(out)
}

/// A length that goes on while bytes are full.
fn length(first: u8, input: &mut std::slice::Iter<'_, u8>) -> Option<usize> {
    let mut total = usize::from(first);
    if first == 15 {
        loop {
            let more = *input.next()?;
            total += usize::from(more);
            if more != 255 {
                break;
            }
        }
    }
    Some(total)
}

/// One block (`doc/lz4_Block_format.md` of LZ4).
fn block(bytes: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let begin = out.len();
    let mut input = bytes.iter();
    while let Some(&token) = input.next() {
        let literals = length(token >> 4, &mut input)?;
        let (copied, left) = input.as_slice().split_at_checked(literals)?;
        out.extend_from_slice(copied);
        input = left.iter();
        // The last sequence has no match.
        let Some(&low) = input.next() else {
            return Some(());
        };
        let back = usize::from(low) | usize::from(*input.next()?) << 8;
        let count = length(token & 15, &mut input)? + 4;
        let from = out
            .len()
            .checked_sub(back)
            .filter(|f| *f >= begin && back > 0)?;
        if out.len() + count > MOST {
            return None;
        }
        for i in 0..count {
            out.push(out[from + i]);
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_repeat_and_damage_is_seen() {
        // Three literals, then seven bytes from three back, then one literal.
        let bytes = [0x33, b'a', b'b', b'c', 3, 0, 0x10, b'd'];
        let mut out = Vec::new();
        block(&bytes, &mut out).expect("a block");
        assert_eq!(out, b"abcabcabcad");
        for damaged in [&bytes[..5], &[0xf0][..], &[0x10, b'a', 9, 0, 0x00][..]] {
            assert_eq!(block(damaged, &mut Vec::new()), None, "{damaged:?}");
        }
        assert!(unpack(b"short").is_err());
        assert!(unpack(&[0; 4096]).is_err());
    }

    #[test]
    fn the_kernel_of_the_image_is_an_elf_file() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.cache/microvm");
        // `make check` runs without the image, `make test` makes it first.
        let Ok(image) = crate::Image::find(folder.as_ref()) else {
            return eprintln!("left out: no image in .cache/microvm, which scripts/setup.sh makes");
        };
        let kernel = unpack(&image.read("vmlinuz").expect("a kernel")).expect("an ELF file");
        assert!(kernel.len() > 20 << 20);
        let version = image.kernel.trim_start_matches("linux-image-");
        let wanted = format!("Linux version {version}");
        assert!(kernel.windows(wanted.len()).any(|w| w == wanted.as_bytes()));
    }
}
