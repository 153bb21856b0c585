//! Linear memory of a program: every address is checked.

use crate::fs::Errno;

/// Maximum buffers of a read or write, the limit of Linux (`IOV_MAX`).
const MAX_IOVECS: u32 = 1024;

/// Bytes of the memory, if all of them are inside.
pub(crate) fn slice(memory: &[u8], at: u32, len: u32) -> Result<&[u8], Errno> {
    let end = (at as usize)
        .checked_add(len as usize)
        .ok_or(Errno::Fault)?;
    memory.get(at as usize..end).ok_or(Errno::Fault)
}

/// Bytes of the memory to write to, if all of them are inside.
pub(crate) fn slice_mut(memory: &mut [u8], at: u32, len: usize) -> Result<&mut [u8], Errno> {
    let end = (at as usize).checked_add(len).ok_or(Errno::Fault)?;
    memory.get_mut(at as usize..end).ok_or(Errno::Fault)
}

/// Adds to an address of the program, which may be invalid.
pub(crate) fn add(at: u32, more: usize) -> Result<u32, Errno> {
    let more = u32::try_from(more).map_err(|_| Errno::Fault)?;
    at.checked_add(more).ok_or(Errno::Fault)
}

/// Writes bytes, all or none.
pub(crate) fn put(memory: &mut [u8], at: u32, bytes: &[u8]) -> Result<(), Errno> {
    slice_mut(memory, at, bytes.len())?.copy_from_slice(bytes);
    Ok(())
}

/// Reads a little-endian number.
pub(crate) fn u32_at(memory: &[u8], at: u32) -> Result<u32, Errno> {
    let bytes = slice(memory, at, 4)?.first_chunk().ok_or(Errno::Fault)?;
    Ok(u32::from_le_bytes(*bytes))
}

/// Reads a little-endian number.
pub(crate) fn u64_at(memory: &[u8], at: u32) -> Result<u64, Errno> {
    let bytes = slice(memory, at, 8)?.first_chunk().ok_or(Errno::Fault)?;
    Ok(u64::from_le_bytes(*bytes))
}

/// Reads `count` buffers of a vectored call: address and length. All of them are inside of the memory.
pub(crate) fn iovecs(memory: &[u8], (at, count): (u32, u32)) -> Result<Vec<(u32, u32)>, Errno> {
    if count > MAX_IOVECS {
        return Err(Errno::Inval);
    }
    let read = |n: usize| {
        let at = add(at, 8 * n)?;
        let (buffer, len) = (u32_at(memory, at)?, u32_at(memory, add(at, 4)?)?);
        slice(memory, buffer, len)?;
        Ok((buffer, len))
    };
    (0..count as usize).map(read).collect()
}
