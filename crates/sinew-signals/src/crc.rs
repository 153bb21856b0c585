//! CRC-32C (Castagnoli), and the masked form that record files use. The polynomial is that of RFC 3720,
//! reflected.

/// The table of the polynomial, a byte at a time.
const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
}

/// CRC-32C of bytes.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, b: &u8| (crc >> 8) ^ TABLE[usize::from(crc as u8 ^ b)];
    !bytes.iter().fold(!0, step)
}

/// Rotated and moved by a constant, so that a checksum of data that holds checksums is not weak. As in the
/// record files of TensorFlow.
pub(crate) fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b""), 0);
    }
}
