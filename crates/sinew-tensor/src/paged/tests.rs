use proptest::prelude::*;

use super::*;
use crate::attention::tests::random;
use crate::attention::{Segment, TreeLayout, reference, tree_attention_forward};
use crate::cpu::KernelSet;

/// Sequences with their tokens' queries, keys and values, stored in scattered blocks.
struct World {
    pool: KvPool,
    /// Fused rows of each sequence, `[tokens, qkv_width]`.
    qkv: Vec<Vec<f32>>,
    tables: Vec<Vec<u32>>,
}

const LAYERS: usize = 2;
const LAYER: usize = 1;

fn device() -> Cpu {
    Cpu::new(KernelSet::detect_f32(), 2)
}

impl World {
    fn new(shape: AttentionShape, block_tokens: usize, lens: &[usize], seed: u64) -> Self {
        let blocks: usize = lens.iter().map(|l| l.div_ceil(block_tokens)).sum();
        let mut pool = KvPool::new(LAYERS, shape, block_tokens, blocks + 1).unwrap();
        let (mut qkv, mut tables) = (Vec::new(), Vec::new());
        let mut next = 0;
        for (i, &len) in lens.iter().enumerate() {
            // Blocks from the end, so that a table is not in order of memory.
            let table: Vec<u32> = (0..len.div_ceil(block_tokens) as u32)
                .map(|b| blocks as u32 - next - b)
                .collect();
            next += table.len() as u32;
            let rows = random(len * shape.qkv_width(), seed + i as u64);
            let slot = |t: usize| {
                table[t / block_tokens] * block_tokens as u32 + (t % block_tokens) as u32
            };
            let slots: Vec<u32> = (0..len).map(slot).collect();
            pool.write(&device(), LAYER, &rows, &slots);
            qkv.push(rows);
            tables.push(table);
        }
        Self { pool, qkv, tables }
    }

    /// Multiplies all queries, keys and values, and stores them again.
    fn rescale(&mut self, factor: f32) {
        let width = self.pool.shape().qkv_width();
        for (rows, table) in self.qkv.iter_mut().zip(&self.tables) {
            rows.iter_mut().for_each(|x| *x *= factor);
            let tokens = self.pool.block_tokens();
            let slot = |t: usize| table[t / tokens] * tokens as u32 + (t % tokens) as u32;
            let slots: Vec<u32> = (0..rows.len() / width).map(slot).collect();
            self.pool.write(&device(), LAYER, rows, &slots);
        }
    }

    /// Output of rows `ranges[i]` of each sequence `i`, in one batch.
    fn attend(&self, dev: &Cpu, ranges: &[(usize, std::ops::Range<usize>)]) -> Vec<f32> {
        let (batch, rows) = self.batch(ranges);
        let mut out = vec![f32::NAN; batch.rows() * self.pool.shape().out_width()];
        let scratch = &mut AttentionScratch::default();
        paged_attention(dev, &self.pool, LAYER, &batch, &rows, &mut out, scratch);
        out
    }

    /// The batch of these rows, with their queries, keys and values.
    fn batch(&self, ranges: &[(usize, std::ops::Range<usize>)]) -> (PagedBatch<'_>, Vec<f32>) {
        let shape = self.pool.shape();
        let mut rows = Vec::new();
        let mut sequences = Vec::new();
        for (i, range) in ranges {
            let width = shape.qkv_width();
            rows.extend(&self.qkv[*i][range.start * width..range.end * width]);
            sequences.push(PagedSequence {
                blocks: &self.tables[*i],
                past: range.start,
                rows: range.len(),
            });
        }
        (PagedBatch::new(sequences), rows)
    }

    fn exact(&self, sequence: usize) -> Vec<f64> {
        let shape = self.pool.shape();
        let qkv: Vec<f64> = self.qkv[sequence].iter().map(|&x| x.into()).collect();
        let len = (qkv.len() / shape.qkv_width()) as u32;
        reference::forward(&TreeLayout::sequences(&[len]).unwrap(), &shape, &qkv).out
    }
}

#[track_caller]
fn assert_close(fast: &[f32], exact: &[f64]) {
    assert_eq!(fast.len(), exact.len());
    for (i, (f, e)) in fast.iter().zip(exact).enumerate() {
        assert!(
            (f64::from(*f) - e).abs() < 1e-5,
            "out[{i}] is {f}, expected {e}"
        );
    }
}

#[test]
fn prompts_agree_with_reference() {
    let shape = AttentionShape::new(9, 3, 64).unwrap();
    let world = World::new(shape, 16, &[150, 1, 64, 37], 3);
    for kernels in KernelSet::available_f32() {
        let dev = Cpu::new(kernels, 2);
        let all = [(0, 0..150), (1, 0..1), (2, 0..64), (3, 0..37)];
        let out = world.attend(&dev, &all);
        let exact: Vec<f64> = (0..4).flat_map(|i| world.exact(i)).collect();
        assert_close(&out, &exact);
    }
}

/// Attention of training, in separate sequences and with shared prefixes, has the bits of attention over
/// stored keys: strips, blocks of keys and rescaling differ, sums do not.
#[test]
fn training_has_the_same_bits() {
    for (heads, kv_heads, dim) in [(9, 3, 64), (4, 1, 24), (2, 2, 80), (8, 2, 128)] {
        let shape = AttentionShape::new(heads, kv_heads, dim).unwrap();
        let mut world = World::new(shape, 16, &[180, 1, 64, 37, 90], 3);
        // Prefixes of the first sequence, and scores of any size.
        let width = shape.qkv_width();
        let first = world.qkv[0].clone();
        for (sequence, shared) in [(2, 41), (4, 70)] {
            world.qkv[sequence][..shared * width].copy_from_slice(&first[..shared * width]);
        }
        world.rescale(3.0);
        let segment = |start, len, position, parent| Segment {
            start,
            len,
            position,
            parent,
        };
        let forest = TreeLayout::new(vec![
            segment(0, 41, 0, None),
            segment(41, 29, 41, Some(0)),
            segment(70, 110, 70, Some(1)),
            segment(180, 1, 0, None),
            segment(181, 23, 41, Some(0)),
            segment(204, 37, 0, None),
            segment(241, 20, 70, Some(1)),
        ]);
        let forest = forest.unwrap();
        // Sequences and rows that stand in the forest, in its order.
        let parts = [(0, 0..180), (1, 0..1), (2, 41..64), (3, 0..37), (4, 70..90)];
        let rows = |i: usize, range: &std::ops::Range<usize>| {
            world.qkv[i][range.start * width..range.end * width].to_vec()
        };
        let packed: Vec<f32> = parts
            .iter()
            .flat_map(|(i, range)| rows(*i, range))
            .collect();
        for kernels in KernelSet::available_f32() {
            let dev = Cpu::new(kernels, 2);
            let mut out = vec![f32::NAN; forest.rows() * shape.out_width()];
            let mut lse = vec![f32::NAN; forest.rows() * heads];
            let scratch = &mut AttentionScratch::default();
            tree_attention_forward(&dev, &forest, &shape, &packed, &mut out, &mut lse, scratch);
            assert_eq!(out, world.attend(&dev, &parts), "{kernels} {shape:?}");
        }
    }
}

#[test]
fn a_row_depends_on_itself_alone() {
    let shape = AttentionShape::new(6, 2, 24).unwrap();
    let world = World::new(shape, 32, &[200, 90, 130, 70, 70, 70, 70, 70, 70, 70], 5);
    let width = shape.out_width();
    for kernels in KernelSet::available_f32() {
        let dev = Cpu::new(kernels, 2);
        let prompt = world.attend(&dev, &[(0, 0..200)]);
        // Cut into chunks, among other sequences, on one thread, and token by token.
        let chunks = [
            (3, 5..70),
            (0, 100..200),
            (0, 0..33),
            (1, 89..90),
            (0, 33..100),
        ];
        let mixed = world.attend(&dev, &chunks);
        let at = |row: usize| row * width;
        assert_eq!(mixed[at(65)..at(165)], prompt[at(100)..at(200)]);
        assert_eq!(mixed[at(165)..at(198)], prompt[..at(33)]);
        assert_eq!(mixed[at(199)..at(266)], prompt[at(33)..at(100)]);
        assert_eq!(world.attend(&Cpu::new(kernels, 1), &chunks), mixed);
        let decode: Vec<_> = (0..10).map(|i| (i, 69..70)).collect();
        let decoded = world.attend(&dev, &decode);
        assert_eq!(decoded[..width], prompt[at(69)..at(70)]);
        assert_eq!(world.attend(&dev, &decode[7..8]), decoded[at(7)..at(8)]);
    }
}

#[test]
fn shared_and_copied_blocks_hold_the_same_keys() {
    let shape = AttentionShape::new(4, 2, 16).unwrap();
    let mut world = World::new(shape, 16, &[40, 5], 7);
    let dev = Cpu::new(KernelSet::detect_f32(), 2);
    let before = world.attend(&dev, &[(0, 39..40)]);
    // A second sequence with the first one's blocks, of which it then owns a copy of the last.
    world.qkv.push(world.qkv[0].clone());
    world.tables.push(world.tables[0].clone());
    let both = world.attend(&dev, &[(0, 39..40), (2, 39..40)]);
    assert_eq!(both, [before.clone(), before.clone()].concat());
    world.pool.copy_block(world.tables[2][2], 0);
    world.tables[2][2] = 0;
    assert_eq!(world.attend(&dev, &[(2, 39..40)]), before);
    let width = shape.qkv_width();
    let other = random(width, 99);
    world.pool.write(&dev, LAYER, &other, &[7]);
    world.qkv[2][39 * width..].copy_from_slice(&other);
    let out = world.attend(&dev, &[(0, 39..40), (2, 39..40)]);
    assert_eq!(out[..shape.out_width()], before);
    assert_close(
        &out[shape.out_width()..],
        &world.exact(2)[39 * shape.out_width()..],
    );
}

/// Chosen queries, in any order and repeated, have the bits they have among all.
#[test]
fn chosen_queries_have_the_same_bits() {
    let shape = AttentionShape::new(6, 2, 24).unwrap();
    // More keys than one task stores for all heads.
    let world = World::new(shape, 16, &[40, 300, 7], 5);
    let ranges = [(0, 10..40), (1, 290..300), (2, 0..7)];
    let (all, wanted) = (world.attend(&device(), &ranges), [46, 0, 29, 0, 31]);
    let (batch, rows) = world.batch(&ranges);
    let batch = batch.only(&wanted);
    assert_eq!(batch.rows(), wanted.len());
    let mut out = vec![f32::NAN; wanted.len() * shape.out_width()];
    let scratch = &mut AttentionScratch::default();
    paged_attention(
        &device(),
        &world.pool,
        LAYER,
        &batch,
        &rows,
        &mut out,
        scratch,
    );
    for (out, row) in out.chunks(shape.out_width()).zip(wanted) {
        assert_eq!(
            out,
            &all[row as usize * shape.out_width()..][..shape.out_width()]
        );
    }
    let nothing = batch.only(&[]);
    paged_attention(
        &device(),
        &world.pool,
        LAYER,
        &nothing,
        &rows,
        &mut [],
        scratch,
    );
}

#[test]
fn other_layers_stay_untouched() {
    let shape = AttentionShape::new(2, 1, 8).unwrap();
    let mut world = World::new(shape, 16, &[20], 1);
    let dev = Cpu::new(KernelSet::detect_f32(), 1);
    let before = world.attend(&dev, &[(0, 0..20)]);
    world.pool.write(
        &dev,
        0,
        &random(shape.qkv_width() * 16, 3),
        &(16..32).collect::<Vec<u32>>(),
    );
    assert_eq!(world.attend(&dev, &[(0, 0..20)]), before);
}

#[test]
fn impossible_pools_are_refused() {
    let shape = AttentionShape::new(2, 1, 8).unwrap();
    let error = |tokens, blocks| KvPool::new(1, shape, tokens, blocks).err();
    assert_eq!(error(24, 2), Some(KvPoolError::BlockTokens(24)));
    assert_eq!(error(0, 2), Some(KvPoolError::BlockTokens(0)));
    let blocks = usize::MAX / 4;
    let block_tokens = 16;
    assert_eq!(
        error(16, blocks),
        Some(KvPoolError::TooLarge {
            blocks,
            block_tokens
        })
    );
    assert_eq!(error(16, 3), None);
}

#[test]
#[should_panic(expected = "sequence 0 lists 2 blocks and needs 3")]
fn short_tables_are_refused() {
    let mut world = World::new(AttentionShape::new(2, 1, 8).unwrap(), 16, &[33], 1);
    world.tables[0].pop();
    world.attend(&Cpu::new(KernelSet::Portable, 1), &[(0, 0..33)]);
}

#[test]
#[should_panic(expected = "sequence 0 names block 9 of 3")]
fn unknown_blocks_are_refused() {
    let mut world = World::new(AttentionShape::new(2, 1, 8).unwrap(), 16, &[32], 1);
    world.tables[0][1] = 9;
    world.attend(&Cpu::new(KernelSet::Portable, 1), &[(0, 0..32)]);
}

#[test]
#[should_panic(expected = "slot 48 lies beyond the 3 blocks")]
fn unknown_slots_are_refused() {
    let shape = AttentionShape::new(2, 1, 8).unwrap();
    let mut pool = KvPool::new(1, shape, 16, 3).unwrap();
    pool.write(&device(), 0, &vec![0.0; shape.qkv_width()], &[48]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_batch_agrees_with_reference(
        lens in prop::collection::vec(1usize..180, 1..6),
        block_tokens in prop::sample::select(vec![16usize, 32, 48, 128]),
        kv_heads in 1usize..3,
        group in 1usize..8,
        head_dim in prop::sample::select(vec![1usize, 6, 16, 40, 64, 80]),
        seed in 1u64..1000,
    ) {
        let shape = AttentionShape::new(kv_heads * group, kv_heads, head_dim).unwrap();
        let world = World::new(shape, block_tokens, &lens, seed);
        // The later half of each sequence, as one chunk.
        let ranges: Vec<_> = lens.iter().enumerate().map(|(i, &l)| (i, l / 2..l)).collect();
        let exact: Vec<f64> = (0..lens.len())
            .flat_map(|i| world.exact(i)[lens[i] / 2 * shape.out_width()..].to_vec())
            .collect();
        for kernels in KernelSet::available_f32() {
            assert_close(&world.attend(&Cpu::new(kernels, 2), &ranges), &exact);
        }
    }
}
