//! The instructions: tile registers, and one block of a product in them.
//!
//! Tiles 0 to 3 hold up to 32 x 32 sums, 4 and 5 two blocks of 16 rows of `a`, 6 and 7 two blocks of 16
//! columns of `b`, 32 steps deep.

use std::arch::asm;
use std::marker::PhantomData;

/// Rows of a block of `a`, columns of a block of `b`.
pub(super) const SIDE: usize = 16;
/// Bytes of a tile.
pub(super) const TILE_BYTES: usize = 1024;

/// Palette 1 with all tiles 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 8],
    unused: [u16; 8],
    rows: [u8; 8],
    unused_rows: [u8; 8],
}

static CONFIG: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64; 8],
    unused: [0; 8],
    rows: [16; 8],
    unused_rows: [0; 8],
};

/// Tiles in use by this thread, until it is dropped: then their state costs nothing to save. It lives
/// within one task of a loop, so that no thread of a pool sleeps or runs other code with it.
#[derive(Debug)]
pub(super) struct Tiles(PhantomData<*mut ()>);

impl Tiles {
    /// # Safety
    /// [`super::support`] has agreed, and this thread holds no other.
    pub(super) unsafe fn load() -> Self {
        // SAFETY: the instructions exist, and the configuration is one that the palette allows.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly));
        }
        Self(PhantomData)
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: `load` ran, so the instruction exists.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// A block `c[16 or 32, 32] (+)= a · b`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    /// Tiles of the first 16 rows, one behind the other.
    pub(super) a: *const u8,
    /// Bytes to the tiles of the next 16 rows.
    pub(super) a_next: usize,
    /// Tiles of the first and of the second 16 columns by turns.
    pub(super) b: *const u8,
    /// Tiles of each, above 0.
    pub(super) steps: usize,
    pub(super) c: *mut f32,
    /// Bytes from one row of `c` to the next.
    pub(super) c_stride: usize,
    /// Whether sums start from `c`, not from 0.
    pub(super) load: bool,
}

/// 32 rows.
///
/// # Safety
/// Pointers cover the block, and `c` belongs to the caller.
pub(super) unsafe fn two_rows(x: &Block, _tiles: &Tiles) {
    // SAFETY: tiles are configured as 16 rows of 64 bytes, which the operands cover.
    unsafe {
        asm!(
            "test {load}, {load}",
            "jz 3f",
            "tileloadd tmm0, [{c} + {stride}*1]",
            "tileloadd tmm1, [{c} + {stride}*1 + 64]",
            "tileloadd tmm2, [{d} + {stride}*1]",
            "tileloadd tmm3, [{d} + {stride}*1 + 64]",
            "jmp 4f",
            "3:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "4:",
            "tileloadd tmm4, [{a0} + {row}*1]",
            "tileloadd tmm6, [{b} + {row}*1]",
            "tileloadd tmm7, [{b} + {row}*1 + 1024]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{a1} + {row}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a0}, 1024",
            "add {a1}, 1024",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 4b",
            "tilestored [{c} + {stride}*1], tmm0",
            "tilestored [{c} + {stride}*1 + 64], tmm1",
            "tilestored [{d} + {stride}*1], tmm2",
            "tilestored [{d} + {stride}*1 + 64], tmm3",
            load = in(reg) usize::from(x.load),
            a0 = inout(reg) x.a => _,
            a1 = inout(reg) x.a.wrapping_add(x.a_next) => _,
            b = inout(reg) x.b => _,
            steps = inout(reg) x.steps => _,
            row = in(reg) 64usize,
            c = in(reg) x.c,
            d = in(reg) x.c.wrapping_byte_add(SIDE * x.c_stride),
            stride = in(reg) x.c_stride,
            options(nostack),
        );
    }
}

/// 16 rows.
///
/// # Safety
/// Same as for [`two_rows`].
pub(super) unsafe fn one_row(x: &Block, _tiles: &Tiles) {
    // SAFETY: tiles are configured as 16 rows of 64 bytes, which the operands cover.
    unsafe {
        asm!(
            "test {load}, {load}",
            "jz 3f",
            "tileloadd tmm0, [{c} + {stride}*1]",
            "tileloadd tmm1, [{c} + {stride}*1 + 64]",
            "jmp 4f",
            "3:",
            "tilezero tmm0",
            "tilezero tmm1",
            "4:",
            "tileloadd tmm4, [{a} + {row}*1]",
            "tileloadd tmm6, [{b} + {row}*1]",
            "tileloadd tmm7, [{b} + {row}*1 + 1024]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {a}, 1024",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 4b",
            "tilestored [{c} + {stride}*1], tmm0",
            "tilestored [{c} + {stride}*1 + 64], tmm1",
            load = in(reg) usize::from(x.load),
            a = inout(reg) x.a => _,
            b = inout(reg) x.b => _,
            steps = inout(reg) x.steps => _,
            row = in(reg) 64usize,
            c = in(reg) x.c,
            stride = in(reg) x.c_stride,
            options(nostack),
        );
    }
}

/// `turns` rounds of four independent products of whole tiles of zeros, only in registers. Returns the number
/// of floating-point operations.
pub(super) fn spin(turns: usize, _tiles: &Tiles) -> f64 {
    const PRODUCTS: usize = 4;
    if turns == 0 {
        return 0.0;
    }
    // SAFETY: tiles are configured, and no memory is touched.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tilezero tmm4",
            "tilezero tmm5",
            "tilezero tmm6",
            "tilezero tmm7",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {turns}",
            "jnz 2b",
            turns = inout(reg) turns => _,
            options(nostack, nomem),
        );
    }
    2.0 * (turns * PRODUCTS * SIDE * SIDE * super::model::DEPTH) as f64
}
