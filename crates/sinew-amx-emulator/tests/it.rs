//! Emulation of instructions, on CPUs without AMX and in processes without tile registers.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]
#![expect(unsafe_code, reason = "the instructions themselves")]

use std::arch::asm;
use std::thread;

fn bf16(x: f32) -> u16 {
    (x.to_bits() >> 16) as u16
}

/// `c += a b` with all shapes and ways to write an address: `[m, 2 k]` by `[k, n, 2]`.
fn product(c: &mut [f32; 16 * 20], a: &[u16; 16 * 40], b: &[u16; 16 * 32]) {
    #[repr(align(64))]
    struct Config([u8; 64]);
    let mut config = Config([0; 64]);
    config.0[0] = 1;
    for (tile, width, rows) in [(0, 64, 13), (3, 60, 13), (7, 64, 15)] {
        config.0[16 + 2 * tile] = width;
        config.0[48 + tile] = rows;
    }
    // SAFETY: the tiles' rows lie in the arrays; tiles are released before the end.
    unsafe {
        asm!(
            "ldtilecfg [{config} - 16]",
            "tilezero tmm0",
            "tileloadd tmm0, [{c} + {eighty}*1 + 16]",
            "tileloaddt1 tmm3, [{a} + r9*8]",
            "tileloadd tmm7, [{b} + {thirty_two}*2 - 1024]",
            "tdpbf16ps tmm0, tmm3, tmm7",
            "tilestored [{c} + {eighty}*1 + 16], tmm0",
            "tilerelease",
            config = in(reg) config.0.as_ptr().wrapping_add(16),
            c = in(reg) c.as_mut_ptr(),
            eighty = in(reg) 80usize,
            a = in(reg) a.as_ptr(),
            in("r9") 10usize,
            b = in(reg) b.as_ptr().wrapping_byte_add(1024),
            thirty_two = in(reg) 32usize,
            options(nostack),
        );
    }
}

#[test]
fn a_product_of_odd_shape_in_every_thread() {
    sinew_amx_emulator::install().unwrap();
    let before = sinew_amx_emulator::products();
    let run = |seed: usize| {
        let value = |i: usize| ((i * 7 + seed) % 11) as f32 - 5.0;
        let a: [u16; 16 * 40] = std::array::from_fn(|i| bf16(value(i)));
        let b: [u16; 16 * 32] = std::array::from_fn(|i| bf16(value(3 * i)));
        let mut c: [f32; 16 * 20] = std::array::from_fn(|i| i as f32);
        product(&mut c, &a, &b);
        for m in 0..16 {
            for n in 0..20 {
                let mut expected = (m * 20 + n) as f32;
                if m < 13 && (4..20).contains(&n) {
                    for k in 0..30 {
                        expected +=
                            value(m * 40 + k) * value(3 * (k / 2 * 32 + (n - 4) * 2 + k % 2));
                    }
                }
                assert_eq!(c[m * 20 + n], expected, "{m} {n}");
            }
        }
    };
    thread::scope(|scope| {
        for seed in 0..3 {
            scope.spawn(move || (0..20).for_each(|i| run(seed * 20 + i)));
        }
    });
    assert_eq!(sinew_amx_emulator::products(), before + 60);
}

/// Each `ldtilecfg` clears the tiles, also with an unchanged configuration. On a CPU with AMX it runs on the
/// CPU, and the emulator finds it in the saved state.
#[test]
fn tiles_are_zero_after_each_configuration() {
    sinew_amx_emulator::install().unwrap();
    assert!(!sinew_amx_emulator::granted());
    #[repr(align(64))]
    struct Config([u8; 64]);
    let mut config = Config([0; 64]);
    (config.0[0], config.0[16], config.0[48]) = (1, 8, 2);
    let from = [1u32, 2, 3, 4];
    let mut found = [[9u32; 4]; 3];
    // SAFETY: two rows of 8 bytes lie in each array; tiles are released before the end.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            "tileloadd tmm0, [{from} + {row}*1]",
            "tilestored [{loaded} + {row}*1], tmm0",
            "ldtilecfg [{config}]",
            "tilestored [{cleared} + {row}*1], tmm0",
            "tileloadd tmm0, [{from} + {row}*1]",
            "tilerelease",
            "ldtilecfg [{config}]",
            "tilestored [{released} + {row}*1], tmm0",
            "tilerelease",
            config = in(reg) config.0.as_ptr(),
            from = in(reg) from.as_ptr(),
            loaded = in(reg) found[0].as_mut_ptr(),
            cleared = in(reg) found[1].as_mut_ptr(),
            released = in(reg) found[2].as_mut_ptr(),
            row = in(reg) 8usize,
            options(nostack),
        );
    }
    assert_eq!(found, [from, [0; 4], [0; 4]]);
}
