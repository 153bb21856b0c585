//! Tile registers and the semantics of instructions.

/// Maximum rows of a tile.
pub const ROWS: usize = 16;
/// Maximum bytes of a row.
pub const ROW_BYTES: usize = 64;
/// Number of tiles in palette 1.
const TILES: usize = 8;

/// A fault of the hardware: an invalid configuration, or an instruction that does not match it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault;

/// A tile register: its configured shape and its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    rows: usize,
    /// Bytes of a row.
    width: usize,
    data: [[u8; ROW_BYTES]; ROWS],
}

impl Tile {
    const UNUSED: Self = Self {
        rows: 0,
        width: 0,
        data: [[0; ROW_BYTES]; ROWS],
    };

    fn word(&self, row: usize, i: usize) -> u32 {
        let bytes = &self.data[row][4 * i..4 * i + 4];
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

/// All tile registers of a thread.
#[derive(Debug)]
pub struct Tiles {
    configured: bool,
    tiles: [Tile; TILES],
}

impl Tiles {
    /// Initial state of a thread.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            configured: false,
            tiles: [Tile::UNUSED; TILES],
        }
    }

    /// `ldtilecfg`: byte 0 is the palette, byte 1 the start row, the words from byte 16 on are the bytes per
    /// row, and the bytes from 48 on the numbers of rows. All others must be zero.
    ///
    /// # Errors
    /// [`Fault`] if the configuration is invalid.
    pub fn configure(&mut self, config: &[u8; 64]) -> Result<(), Fault> {
        if config[0] == 0 {
            self.release();
            return Ok(());
        }
        let unused = config[2..16]
            .iter()
            .chain(&config[32..48])
            .chain(&config[56..]);
        if config[0] != 1 || config[1] != 0 || unused.copied().any(|b| b != 0) {
            return Err(Fault);
        }
        self.release();
        for (i, tile) in self.tiles.iter_mut().enumerate() {
            let width = usize::from(u16::from_le_bytes([config[16 + 2 * i], config[17 + 2 * i]]));
            let rows = usize::from(config[48 + i]);
            if rows > ROWS || width > ROW_BYTES || (rows == 0) != (width == 0) {
                return Err(Fault);
            }
            (tile.rows, tile.width) = (rows, width);
        }
        self.configured = true;
        Ok(())
    }

    /// `tilerelease`
    pub fn release(&mut self) {
        *self = Self::new();
    }

    fn used(&mut self, tile: u8) -> Result<&mut Tile, Fault> {
        match self.tiles.get_mut(usize::from(tile)) {
            Some(tile) if self.configured && tile.rows > 0 => Ok(tile),
            _ => Err(Fault),
        }
    }

    /// `tilezero`
    ///
    /// # Errors
    /// [`Fault`] if the tile is not configured.
    pub fn zero(&mut self, tile: u8) -> Result<(), Fault> {
        self.used(tile)?.data = Tile::UNUSED.data;
        Ok(())
    }

    /// `tileloadd`: `read` fills the rows in order. Data outside of the configured shape becomes 0.
    ///
    /// # Errors
    /// [`Fault`] if the tile is not configured.
    pub fn load(&mut self, tile: u8, read: impl Fn(usize, &mut [u8])) -> Result<(), Fault> {
        let tile = self.used(tile)?;
        tile.data = Tile::UNUSED.data;
        for (i, row) in tile.data[..tile.rows].iter_mut().enumerate() {
            read(i, &mut row[..tile.width]);
        }
        Ok(())
    }

    /// `tilestored`: `write` receives the rows of the configured shape in order.
    ///
    /// # Errors
    /// [`Fault`] if the tile is not configured.
    pub fn store(&mut self, tile: u8, write: impl Fn(usize, &[u8])) -> Result<(), Fault> {
        let tile = self.used(tile)?;
        for (i, row) in tile.data[..tile.rows].iter().enumerate() {
            write(i, &row[..tile.width]);
        }
        Ok(())
    }

    /// `tdpbf16ps`: for each element of `sum`, adds the even and the odd members of the pairs separately by
    /// fused multiply-adds in ascending order from 0, then both sums, then the old value. Subnormal operands
    /// and results become 0. (Results are flushed after rounding to `f32`. Hardware rounds with an unlimited
    /// exponent, which differs for results within half a unit of the smallest normal number.)
    ///
    /// # Errors
    /// [`Fault`] if shapes do not match, or a tile is used twice.
    pub fn dot(&mut self, sum: u8, a: u8, b: u8) -> Result<(), Fault> {
        if sum == a || sum == b || a == b {
            return Err(Fault);
        }
        let (left, right) = (*self.used(a)?, *self.used(b)?);
        let sum = self.used(sum)?;
        let fits =
            sum.rows == left.rows && left.width == 4 * right.rows && sum.width == right.width;
        if !fits || !sum.width.is_multiple_of(4) {
            return Err(Fault);
        }
        if std::arch::is_x86_feature_detected!("fma") && std::arch::is_x86_feature_detected!("avx2")
        {
            // SAFETY: the CPU has the features.
            unsafe { add_products_fma(sum, &left, &right) };
        } else {
            add_products(sum, &left, &right);
        }
        Ok(())
    }
}

impl Default for Tiles {
    fn default() -> Self {
        Self::new()
    }
}

/// 0 of the same sign for what is no normal number.
#[inline(always)]
fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE {
        0.0f32.copysign(x)
    } else {
        x
    }
}

/// The two bfloat16 values of a word.
#[inline(always)]
fn pair(word: u32) -> [f32; 2] {
    [word << 16, word & 0xffff_0000].map(|bits| flush(f32::from_bits(bits)))
}

#[target_feature(enable = "avx2,fma")]
fn add_products_fma(sum: &mut Tile, a: &Tile, b: &Tile) {
    add_products(sum, a, b);
}

#[inline(always)]
fn add_products(sum: &mut Tile, a: &Tile, b: &Tile) {
    const COLS: usize = ROW_BYTES / 4;
    let right: [[[f32; COLS]; 2]; ROWS] = std::array::from_fn(|k| {
        let pairs: [[f32; 2]; COLS] = std::array::from_fn(|n| pair(b.word(k, n)));
        [pairs.map(|p| p[0]), pairs.map(|p| p[1])]
    });
    for m in 0..sum.rows {
        let mut sums = [[0.0f32; COLS]; 2];
        for (k, right) in right.iter().enumerate().take(a.width / 4) {
            let left = pair(a.word(m, k));
            for (half, sums) in sums.iter_mut().enumerate() {
                for (sum, right) in sums.iter_mut().zip(&right[half]) {
                    *sum = flush(left[half].mul_add(*right, *sum));
                }
            }
        }
        let [even, odd] = sums;
        for (n, (even, odd)) in even.into_iter().zip(odd).enumerate().take(sum.width / 4) {
            let old = flush(f32::from_bits(sum.word(m, n)));
            let new = flush(old + flush(even + odd));
            sum.data[m][4 * n..4 * n + 4].copy_from_slice(&new.to_bits().to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(shape: &[(u8, u16)]) -> [u8; 64] {
        let mut config = [0; 64];
        config[0] = 1;
        for (i, &(rows, width)) in shape.iter().enumerate() {
            config[16 + 2 * i..18 + 2 * i].copy_from_slice(&width.to_le_bytes());
            config[48 + i] = rows;
        }
        config
    }

    fn fill(tiles: &mut Tiles, tile: u8, value: impl Fn(usize, usize) -> u32) {
        tiles
            .load(tile, |row, to| {
                for (i, word) in to.chunks_exact_mut(4).enumerate() {
                    word.copy_from_slice(&value(row, i).to_le_bytes());
                }
            })
            .unwrap();
    }

    fn words(even: f32, odd: f32) -> u32 {
        even.to_bits() >> 16 | (odd.to_bits() & 0xffff_0000)
    }

    #[test]
    fn products_have_the_shape_of_the_configuration() {
        let mut tiles = Tiles::new();
        // [2, 3] += [2, 2 pairs] x [2 pairs, 3]
        tiles
            .configure(&config(&[(2, 12), (2, 8), (2, 12)]))
            .unwrap();
        fill(&mut tiles, 0, |m, n| ((10 * m + n) as f32).to_bits());
        fill(&mut tiles, 1, |m, k| words((m + k) as f32, 1.0));
        fill(&mut tiles, 2, |k, n| words((k + 1) as f32, n as f32));
        tiles.dot(0, 1, 2).unwrap();
        for m in 0..2 {
            for n in 0..3 {
                let product = (0..2).map(|k| (m + k) * (k + 1) + n).sum::<usize>();
                let found = f32::from_bits(tiles.tiles[0].word(m, n));
                assert_eq!(found, (10 * m + n + product) as f32, "{m} {n}");
            }
            assert_eq!(tiles.tiles[0].word(m, 3), 0);
        }
    }

    #[test]
    fn small_numbers_count_as_zero() {
        let mut tiles = Tiles::new();
        tiles.configure(&config(&[(1, 4), (1, 4), (1, 4)])).unwrap();
        let tiny = f32::MIN_POSITIVE;
        let mut result = |sum: f32, a: [f32; 2], b: [f32; 2]| {
            fill(&mut tiles, 0, |_, _| sum.to_bits());
            fill(&mut tiles, 1, |_, _| words(a[0], a[1]));
            fill(&mut tiles, 2, |_, _| words(b[0], b[1]));
            tiles.dot(0, 1, 2).unwrap();
            f32::from_bits(tiles.tiles[0].word(0, 0))
        };
        assert_eq!(result(0.0, [tiny / 2.0, 0.0], [256.0, 0.0]), 0.0);
        assert_eq!(result(0.0, [tiny, 0.0], [0.5, 0.0]), 0.0);
        assert_eq!(result(tiny / 2.0, [0.0; 2], [0.0; 2]), 0.0);
        assert_eq!(result(0.0, [tiny, 0.0], [2.0, 0.0]), 2.0 * tiny);
        // The even and the odd product meet before the old value: 1 - 1 + 2^-30 is exact.
        let small = 2f32.powi(-30);
        assert_eq!(result(small, [1.0, 1.0], [1.0, -1.0]), small);
        assert!(result(0.0, [f32::INFINITY, 0.0], [0.0, 1.0]).is_nan());
    }

    #[test]
    fn what_would_fault_is_refused() {
        let mut tiles = Tiles::new();
        assert_eq!(tiles.zero(0), Err(Fault), "not configured");
        for bad in [(17, 64), (16, 65), (0, 4), (1, 0)] {
            assert_eq!(tiles.configure(&config(&[bad])), Err(Fault), "{bad:?}");
        }
        let mut reserved = config(&[(1, 4)]);
        reserved[5] = 1;
        assert_eq!(tiles.configure(&reserved), Err(Fault));
        tiles
            .configure(&config(&[(2, 8), (2, 8), (2, 8), (1, 8)]))
            .unwrap();
        assert_eq!(tiles.dot(0, 1, 1), Err(Fault), "twice the same");
        assert_eq!(tiles.dot(0, 3, 2), Err(Fault), "rows");
        assert_eq!(tiles.dot(0, 1, 5), Err(Fault), "an unused tile");
        assert_eq!(tiles.dot(0, 1, 2), Ok(()));
        tiles.release();
        assert_eq!(tiles.dot(0, 1, 2), Err(Fault), "released");
    }
}
