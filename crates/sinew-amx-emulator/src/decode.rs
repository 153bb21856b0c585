//! Decoder of AMX instructions.

/// A memory operand: `base + index << shift + displacement`. The index is the stride of rows in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// Number of the base register.
    pub base: Option<u8>,
    /// Number of the index register, and its shift.
    pub index: Option<(u8, u8)>,
    pub displacement: i32,
}

/// An AMX instruction with tile numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instruction {
    LoadConfig(Address),
    Release,
    Zero(u8),
    /// `tileloadd`, and `tileloaddt1`, which differs only in a cache hint.
    Load(u8, Address),
    Store(u8, Address),
    /// `tdpbf16ps sum, a, b`
    Dot {
        sum: u8,
        a: u8,
        b: u8,
    },
}

const VEX3: u8 = 0xc4;
/// Opcode map `0F 38`, in the low five bits of the second byte.
const MAP_0F38: u8 = 2;

/// The last two bits of the third byte: the implied legacy prefix.
mod prefix {
    pub(super) const NONE: u8 = 0;
    pub(super) const P66: u8 = 1;
    pub(super) const PF3: u8 = 2;
    pub(super) const PF2: u8 = 3;
}

/// Decodes the instruction with the bytes `byte(i)` and returns its length. `None` if it is not supported.
/// Reads bytes in order, and none after the instruction.
pub fn decode(byte: impl Fn(usize) -> u8) -> Option<(Instruction, usize)> {
    if byte(0) != VEX3 {
        return None;
    }
    let (second, third) = (byte(1), byte(2));
    // W must be 0 and L 128 bits; R extends a tile number, of which there are 8.
    if second & 0x1f != MAP_0F38 || third & 0x84 != 0 || second & 0x80 == 0 {
        return None;
    }
    // Extensions are stored inverted.
    let extend = |bit: u8| if second & bit == 0 { 8 } else { 0 };
    let (extend_index, extend_base) = (extend(0x40), extend(0x20));
    let (third_tile, prefix) = (!(third >> 3) & 15, third & 3);
    let (opcode, modrm) = (byte(3), byte(4));
    let (mode, reg, rm) = (modrm >> 6, modrm >> 3 & 7, modrm & 7);
    let plain = third_tile == 0;
    let memory =
        |needs_index: bool| address(&byte, mode, rm, extend_index, extend_base, needs_index);
    match (opcode, prefix) {
        (0x49, prefix::NONE) if plain && modrm == 0xc0 => Some((Instruction::Release, 5)),
        (0x49, prefix::NONE) if plain && mode != 3 && reg == 0 => {
            memory(false).map(|(a, length)| (Instruction::LoadConfig(a), length))
        }
        (0x49, prefix::PF2) if plain && mode == 3 && rm == 0 => Some((Instruction::Zero(reg), 5)),
        (0x4b, prefix::PF2 | prefix::P66) if plain && mode != 3 => {
            memory(true).map(|(a, length)| (Instruction::Load(reg, a), length))
        }
        (0x4b, prefix::PF3) if plain && mode != 3 => {
            memory(true).map(|(a, length)| (Instruction::Store(reg, a), length))
        }
        (0x5c, prefix::PF3) if mode == 3 && third_tile < 8 && extend_base == 0 => {
            let (sum, a, b) = (reg, rm, third_tile);
            Some((Instruction::Dot { sum, a, b }, 5))
        }
        _ => None,
    }
}

/// Decodes the memory operand after ModRM, and returns the length of the instruction.
fn address(
    byte: &impl Fn(usize) -> u8,
    mode: u8,
    rm: u8,
    extend_index: u8,
    extend_base: u8,
    needs_index: bool,
) -> Option<(Address, usize)> {
    let mut at = 5;
    let (base, index) = if rm == 4 {
        let sib = byte(at);
        at += 1;
        let (shift, index, base) = (sib >> 6, (sib >> 3 & 7) | extend_index, sib & 7);
        let absolute = base == 5 && mode == 0;
        (
            (!absolute).then_some(base | extend_base),
            (index != 4).then_some((index, shift)),
        )
    } else if needs_index || (mode == 0 && rm == 5) {
        // Tile instructions need a SIB byte. Others do not use addresses relative to the instruction.
        return None;
    } else {
        (Some(rm | extend_base), None)
    };
    let displacement = match mode {
        1 => {
            at += 1;
            i32::from(byte(at - 1) as i8)
        }
        0 if base.is_some() => 0,
        _ => {
            at += 4;
            i32::from_le_bytes(std::array::from_fn(|i| byte(at - 4 + i)))
        }
    };
    let address = Address {
        base,
        index,
        displacement,
    };
    Some((address, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> Option<(Instruction, usize)> {
        decode(|i| bytes[i])
    }

    #[test]
    fn encodings_of_an_assembler_are_understood() {
        // Bytes of the GNU assembler 2.40.
        let plain = |base, index, displacement| Address {
            base: Some(base),
            index,
            displacement,
        };
        let rows = [
            // tdpbf16ps tmm0, tmm4, tmm6
            (
                &[0xc4, 0xe2, 0x4a, 0x5c, 0xc4][..],
                Instruction::Dot { sum: 0, a: 4, b: 6 },
            ),
            // tilerelease
            (&[0xc4, 0xe2, 0x78, 0x49, 0xc0], Instruction::Release),
            // tilezero tmm3
            (&[0xc4, 0xe2, 0x7b, 0x49, 0xd8], Instruction::Zero(3)),
            // ldtilecfg [rax]
            (
                &[0xc4, 0xe2, 0x78, 0x49, 0x00],
                Instruction::LoadConfig(plain(0, None, 0)),
            ),
            // ldtilecfg [r12 + 8]
            (
                &[0xc4, 0xc2, 0x78, 0x49, 0x44, 0x24, 0x08],
                Instruction::LoadConfig(plain(12, None, 8)),
            ),
            // tileloadd tmm4, [rdi + rsi*1]
            (
                &[0xc4, 0xe2, 0x7b, 0x4b, 0x24, 0x37],
                Instruction::Load(4, plain(7, Some((6, 0)), 0)),
            ),
            // tileloaddt1 tmm1, [r13 + r9*4 + 64]
            (
                &[0xc4, 0x82, 0x79, 0x4b, 0x4c, 0x8d, 0x40],
                Instruction::Load(1, plain(13, Some((9, 2)), 64)),
            ),
            // tilestored [rax + rcx*1 + 1024], tmm7
            (
                &[0xc4, 0xe2, 0x7a, 0x4b, 0xbc, 0x08, 0x00, 0x04, 0x00, 0x00],
                Instruction::Store(7, plain(0, Some((1, 0)), 1024)),
            ),
        ];
        for (bytes, expected) in rows {
            assert_eq!(of(bytes), Some((expected, bytes.len())), "{bytes:x?}");
        }
    }

    #[test]
    fn other_instructions_are_left_alone() {
        for bytes in [
            // ud2, vaddps, tdpbssd, a 256-bit form, W = 1, a tile beyond 7
            &[0x0f, 0x0b, 0, 0, 0][..],
            &[0xc5, 0xf8, 0x58, 0xc0, 0],
            &[0xc4, 0xe2, 0x4b, 0x5e, 0xc4],
            &[0xc4, 0xe2, 0x4e, 0x5c, 0xc4],
            &[0xc4, 0xe2, 0xca, 0x5c, 0xc4],
            &[0xc4, 0xe2, 0x0a, 0x5c, 0xc4],
        ] {
            assert_eq!(of(bytes), None, "{bytes:x?}");
        }
    }
}
